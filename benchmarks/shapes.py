"""The decode shapes that are measured, and their arrays on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

TOPK = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """R requests of `context` tokens each, H index heads, `query_len` tokens a request."""

    requests: int
    heads: int
    query_len: int
    context: int
    dtype: str = "bfloat16"

    @property
    def bytes(self) -> int:
        """Bytes of index keys one call reads; all else is below 1%."""
        return self.requests * self.context * 128 * jnp.dtype(self.dtype).itemsize

    @property
    def statics(self) -> tuple[int, ...]:
        """`max_seq_len` to `max_decode_query_len`, as MiniMax-M3 runs."""
        return self.context, TOPK, 0, 1, self.heads, self.query_len, self.query_len

    def __str__(self) -> str:
        size = f"{self.context // 2**20}M" if self.context >= 2**20 else f"{self.context // 1024}K"
        kind = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"R {self.requests} H {self.heads} q {self.query_len} {size}{kind}"


K, M = 1024, 2**20
DECODE = (
    Shape(1, 1, 1, 8 * K),
    Shape(1, 1, 1, 128 * K),
    Shape(1, 4, 1, 128 * K),
    Shape(8, 1, 1, 128 * K),
    Shape(8, 4, 1, 128 * K),
    Shape(64, 1, 1, 32 * K),
    Shape(64, 4, 1, 32 * K),
    Shape(64, 4, 1, 128 * K),
    Shape(16, 1, 1, M),
    Shape(32, 4, 4, 128 * K),
    Shape(128, 1, 1, 8 * K),
    Shape(256, 4, 1, 4 * K),
)
PORTABLE = (
    Shape(1, 1, 1, 8 * K),
    Shape(1, 4, 1, 64 * K),
    Shape(4, 1, 1, 32 * K),
    Shape(8, 4, 1, 8 * K),
    Shape(16, 4, 1, 4 * K),
    Shape(8, 4, 4, 8 * K),
    Shape(8, 4, 1, 8 * K, "float32"),
)


def decode_arrays(shape: Shape, calls: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries `[calls, T, H, D]`, pages, a shuffled block table and full lengths."""
    blocks = shape.context // 128
    pages = shape.requests * blocks
    keys = jax.random.split(jax.random.key(0), 2)
    dtype = jnp.dtype(shape.dtype)
    make_pages = jax.jit(lambda key: jax.random.normal(key, (pages, 128, 128), jnp.bfloat16).astype(dtype))
    queries = jax.random.normal(
        keys[1], (calls, shape.requests * shape.query_len, shape.heads, 128), jnp.bfloat16
    ).astype(dtype)
    table = np.random.default_rng(0).permutation(pages).reshape(shape.requests, blocks).astype(np.int32)
    lengths = np.full(shape.requests, shape.context, np.int32)
    return queries, make_pages(keys[0]), jnp.asarray(table), jnp.asarray(lengths)
