"""What only a real GPU can show. Run with `JAX_PLATFORMS=cuda,cpu` (or `rocm,cpu`); skipped elsewhere.

On a GPU the rest of the suite runs the compiled kernels too: None picks them there.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m3_pallas
from m3_pallas import policy
from m3_pallas.measure import calls
from m3_pallas.measure.cases import Decode, decode_inputs

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")

RAGGED = Decode(seq_lens=(128 * 700 + 5, 0, 128 * 90, 1, 129), pages=64, heads=2, query_len=2, max_query_len=2)
LAUNCHES = {
    "balanced": policy.BalancedScore(budget=300, num_warps=4, num_stages=2),
    "split": policy.SplitScore(num_chunks=32, num_warps=4, num_stages=3, min_columns=8),
}
SELECTIONS = {
    "one chunk": policy.Selection(num_chunks=1, tile=1024, num_warps=4, num_stages=1, single_tile=True),
    "merge": policy.Selection(num_chunks=16, tile=64, num_warps=4, num_stages=1, single_tile=True, adaptive_merge=True),
    "tiles and merge": policy.Selection(num_chunks=4, tile=64, num_warps=2, num_stages=1),
}


def triton(case, inputs=None, **options):
    return calls.decode(case, inputs, implementation="pallas_triton", **options)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("score", LAUNCHES)
def test_repeats_are_bitwise_equal(score, selection):
    launch = policy.DecodeLaunch(score=LAUNCHES[score], selection=SELECTIONS[selection])
    inputs = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in decode_inputs(RAGGED).items()}
    expected = calls.decode_oracle(RAGGED)[0]
    dirty = jnp.full((RAGGED.heads, len(RAGGED.seq_lens) * RAGGED.query_len), 7, jnp.int32)
    for _ in range(20):
        result = triton(RAGGED, inputs, completion_counter=dirty, launch=launch)
        np.testing.assert_array_equal(result.topk_idx, expected)
        np.testing.assert_array_equal(result.completion_counter, np.zeros_like(dirty))


@pytest.fixture(scope="module")
def long_cache():
    """Arrays of eight requests of up to 32K tokens: queries, pages, table."""
    keys = jax.random.split(jax.random.key(0), 3)
    pages = jax.random.normal(keys[0], (1024, 128, 128), jnp.bfloat16)
    table = jax.random.randint(keys[1], (8, 256), 0, 1024, jnp.int32)
    return jax.random.normal(keys[2], (8, 4, 128), jnp.bfloat16), pages, table


@functools.partial(jax.jit, static_argnames="implementation")
def decode_32k(queries, pages, table, seq_lens, implementation):
    return m3_pallas.minimax_m3_index_decode(
        queries, pages, table, seq_lens, 32768, 16, 0, 1, 4, 1, 1, implementation=implementation
    )


def lengths(seed):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32769, 8), jnp.int32)


def test_changing_lengths_replay_one_program(long_cache):
    for seed in range(10):
        actual = decode_32k(*long_cache, lengths(seed), implementation="pallas_triton")
        np.testing.assert_array_equal(actual, decode_32k(*long_cache, lengths(seed), implementation="xla"))


def test_concurrent_calls_do_not_share_scratch(long_cache):
    expected = [decode_32k(*long_cache, lengths(seed), implementation="xla") for seed in range(4)]

    def caller(seed):
        return [decode_32k(*long_cache, lengths(seed), implementation="pallas_triton") for _ in range(25)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for results, ids in zip(pool.map(caller, range(4)), expected, strict=True):
            for result in results:
                np.testing.assert_array_equal(result, ids)


def test_donated_out_keeps_its_address(long_cache):
    queries, pages, table = long_cache

    @functools.partial(jax.jit, donate_argnums=0)
    def step(out, seq_lens):
        return m3_pallas.minimax_m3_index_decode(
            queries, pages, table, seq_lens, 32768, 16, 0, 1, 4, 1, 1, out, implementation="pallas_triton"
        )

    out = jnp.full((4, 10, 16), -7, jnp.int32)
    address = out.unsafe_buffer_pointer()
    for seed in range(3):
        out = step(out, lengths(seed))
        assert out.unsafe_buffer_pointer() == address
        np.testing.assert_array_equal(out[:, :8], decode_32k(*long_cache, lengths(seed), implementation="xla"))
        np.testing.assert_array_equal(out[:, 8:], -7)


def test_pages_past_two_to_the_31_elements(long_cache):
    """131,072 pages of D 128 are `2**31` elements."""
    queries, pages, table = long_cache
    first = 140_000
    big = jax.jit(lambda p: jnp.full((first + 1024, 128, 128), jnp.nan, p.dtype).at[first:].set(p))(pages)
    actual = decode_32k(queries, big, table + first, lengths(0), implementation="pallas_triton")
    np.testing.assert_array_equal(actual, decode_32k(*long_cache, lengths(0), implementation="xla"))


def test_garbage_values_stay_inside(long_cache):
    """Wild pages and lengths give some ids or none, and leave the other requests' answers alone."""
    queries, pages, table = long_cache
    wild = table.at[0].set(2**30).at[1].set(-(2**31)).at[2, ::2].set(1024)
    seq_lens = lengths(1).at[2].set(2**31 - 1).at[3].set(-(2**31))
    ids = decode_32k(queries, pages, wild, seq_lens, implementation="pallas_triton")
    assert int(ids.min()) >= -1
    assert int(ids.max()) < 256
    np.testing.assert_array_equal(ids[:, 3], -1)
    expected = decode_32k(*long_cache, lengths(1), implementation="xla")
    np.testing.assert_array_equal(ids[:, 4:], expected[:, 4:])
