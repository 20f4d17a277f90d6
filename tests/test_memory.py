"""Temporaries of the portable implementation, from the compiler: bounded whatever the context."""

import jax
import jax.numpy as jnp
import pytest

import m3_pallas

LIMIT = 64 << 20


def temporaries(function, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("requests", "context"), [(64, 128 << 10), (64, 1 << 20), (1, 65534 * 128)])
@pytest.mark.parametrize("heads", [1, 4])
def test_decode(requests, context, heads):
    blocks = context // 128

    def decode(*arrays):
        return m3_pallas.minimax_m3_index_decode(*arrays, context, 16, 0, 1, heads, 1, 1, implementation="xla")

    used = temporaries(
        decode,
        ((requests, heads, 128), jnp.bfloat16),
        ((requests * 1024, 128, 128), jnp.bfloat16),
        ((requests, blocks), jnp.int32),
        ((requests,), jnp.int32),
    )
    assert used - heads * requests * blocks * 4 <= LIMIT


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_prefill(tokens):
    context, width = 128 << 10, 1024

    def score(*arrays):
        return m3_pallas.minimax_m3_index_score(*arrays, tokens, context, 4, implementation="xla")

    i32 = jnp.int32
    queries, pages = ((tokens, 4, 128), jnp.bfloat16), ((4096, 128, 128), jnp.bfloat16)
    used = temporaries(score, queries, pages, ((2, width), i32), ((3,), i32), ((2,), i32), ((2,), i32))
    assert used <= LIMIT  # the score array itself is the output

    def topk(*arrays):
        return m3_pallas.minimax_m3_index_topk(*arrays, tokens, 16, 0, 1, implementation="xla")

    assert temporaries(topk, ((4, tokens, width), jnp.float32), ((3,), i32), ((2,), i32)) <= LIMIT


@pytest.mark.parametrize(
    ("tokens", "context", "heads", "dtype"),
    [
        (16384, 1 << 20, 1, jnp.bfloat16),
        (16384, 1 << 20, 4, jnp.bfloat16),
        (8192, 131072, 4, jnp.bfloat16),
        (131072, 4096, 4, jnp.bfloat16),  # here a token's queries are larger than its scores
        (262144, 2048, 4, jnp.float32),
    ],
)
def test_combined_prefill(tokens, context, heads, dtype):
    """Where the two calls need `heads * tokens * context / 128 * 4` bytes, up to 2 GiB."""

    def prefill(*arrays):
        return m3_pallas.minimax_m3_index_prefill(
            *arrays, tokens, context, 16, 0, 1, heads, implementation="xla"
        )  # fmt: skip

    i32 = jnp.int32
    queries, pages = ((tokens, heads, 128), dtype), ((8192, 128, 128), dtype)
    table = ((2, context // 128), i32)
    assert temporaries(prefill, queries, pages, table, ((3,), i32), ((2,), i32), ((2,), i32)) <= LIMIT
