"""The shapes that are measured, and their arrays on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

TOPK = 16
PREFILL_CALLS = 4  # of a chain, each with scores of its own


@dataclasses.dataclass(frozen=True)
class DecodeShape:
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
    def needed(self) -> int:
        """Bytes to measure it: the cache, and what making it takes."""
        return 3 * self.bytes

    @property
    def gathered(self) -> int:
        """Bytes that the XLA way keeps: cache, gathered keys, and all products in float32 twice."""
        return 2 * self.bytes + 8 * self.requests * self.query_len * self.heads * self.context

    @property
    def statics(self) -> tuple[int, ...]:
        """`max_seq_len` to `max_decode_query_len`, as MiniMax-M3 runs."""
        return self.context, TOPK, 0, 1, self.heads, self.query_len, self.query_len

    def __str__(self) -> str:
        kind = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"R {self.requests} H {self.heads} q {self.query_len} {short(self.context)}{kind}"


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """One request: `tokens` query tokens after a `prefix`, H index heads."""

    heads: int
    tokens: int
    prefix: int

    @property
    def context(self) -> int:
        return self.prefix + self.tokens

    @property
    def needed(self) -> int:
        """Bytes to measure it: index keys and what making them takes; ours, a peer's and a chain's scores."""
        return 3 * self.context * 256 + 3 * PREFILL_CALLS * self.heads * self.tokens * self.context // 128 * 4

    @property
    def gathered(self) -> int:
        """Bytes that the XLA way keeps: index keys twice, and all products in float32 twice."""
        return 2 * self.context * 256 + 8 * self.heads * self.tokens * self.context

    @property
    def flops(self) -> int:
        """Of the products with visible blocks."""
        blocks = (self.prefix + np.arange(self.tokens)) // 128 + 1
        return int(2 * 128 * self.heads * blocks.sum() * 128)

    @property
    def statics(self) -> tuple[int, int, int]:
        """`max_query_len` to `num_kv_heads`."""
        return self.tokens, self.context, self.heads

    def __str__(self) -> str:
        return f"H {self.heads} T {self.tokens} prefix {self.prefix}"


def short(tokens: int) -> str:
    """131072 as "128K"."""
    if tokens % 1024:
        return str(tokens)
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else f"{tokens // 1024}K"


K, M = 1024, 2**20
# The twelve shapes at which vLLM's kernels are known, and the five of prefill.
DECODE = (
    DecodeShape(1, 1, 1, 8 * K),
    DecodeShape(1, 1, 1, 128 * K),
    DecodeShape(1, 4, 1, 128 * K),
    DecodeShape(8, 1, 1, 128 * K),
    DecodeShape(8, 4, 1, 128 * K),
    DecodeShape(64, 1, 1, 32 * K),
    DecodeShape(64, 4, 1, 32 * K),
    DecodeShape(64, 4, 1, 128 * K),
    DecodeShape(16, 1, 1, M),
    DecodeShape(32, 4, 4, 128 * K),
    DecodeShape(128, 1, 1, 8 * K),
    DecodeShape(256, 4, 1, 4 * K),
)
PREFILL = (
    PrefillShape(1, 8192, 0),
    PrefillShape(4, 8192, 0),
    PrefillShape(4, 8192, 122880),
    PrefillShape(1, 8192, 122880),
    PrefillShape(4, 2048, 30720),
)
PORTABLE = (
    DecodeShape(1, 1, 1, 8 * K),
    DecodeShape(1, 4, 1, 64 * K),
    DecodeShape(4, 1, 1, 32 * K),
    DecodeShape(8, 4, 1, 8 * K),
    DecodeShape(16, 4, 1, 4 * K),
    DecodeShape(8, 4, 4, 8 * K),
    DecodeShape(8, 4, 1, 8 * K, "float32"),
)


def decode_arrays(shape: DecodeShape, calls: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries `[calls, T, H, D]`, pages, a shuffled block table and full lengths."""
    blocks = -(-shape.context // 128)
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


def prefill_arrays(shape: PrefillShape, calls: int) -> tuple[jax.Array, ...]:
    """Queries `[calls, T, H, D]`, pages, table, cu_seqlens_q, seq_lens, prefix_lens."""
    blocks = -(-shape.context // 128)
    keys = jax.random.split(jax.random.key(0), 2)
    queries = jax.random.normal(keys[0], (calls, shape.tokens, shape.heads, 128), jnp.bfloat16)
    pages = jax.random.normal(keys[1], (blocks, 128, 128), jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(0).permutation(blocks)[None], jnp.int32)
    lengths = [jnp.array(x, jnp.int32) for x in ([0, shape.tokens], [shape.context], [shape.prefix])]
    return queries, pages, table, *lengths
