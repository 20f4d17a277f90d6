"""Properties of the answers, over drawn inputs. Small integers as values make ties common and sums exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m3_pallas
from m3_pallas import reference
from tests.conftest import DISTINCT

BLOCKS, DIM, PAGES = 5, 16, 12  # widths are fixed, so that few programs are compiled
SPECIAL = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1.0,
    np.nextafter(np.float32(1), np.float32(2)),
    -2e30,
    1e29,
    1e30,
    3.4e38,
]


@st.composite
def batches(draw, requests=3):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = st.one_of(st.integers(0, BLOCKS * 128), st.sampled_from([0, 1, 127, 128, 129, BLOCKS * 128]))
    seq_lens = np.array(draw(st.lists(lengths, min_size=requests, max_size=requests)), np.int32)
    pages = rng.integers(-1, 2, (PAGES, 128, DIM)).astype(np.float32)
    table = rng.integers(0, PAGES, (requests, BLOCKS)).astype(np.int32)
    queries = rng.integers(-1, 2, (requests * 2, 2, DIM)).astype(np.float32)
    return queries, pages, table, seq_lens


@functools.partial(jax.jit, static_argnames=("topk", "init_blocks", "local_blocks", "query_len", "options"))
def decode(queries, pages, table, seq_lens, topk=4, init_blocks=0, local_blocks=1, query_len=2, options=()):
    return m3_pallas.minimax_m3_index_decode(
        queries, pages, table, seq_lens, BLOCKS * 128, topk, init_blocks, local_blocks, 2, query_len, 2, **dict(options)
    )


@given(batches(), st.sampled_from([(0, 1), (1, 1), (2, 3), (0, 0), (9, 9)]))
def test_every_implementation_equals_the_oracle(batch, forced):
    init_blocks, local_blocks = forced
    expected = reference.index_decode(
        *batch, topk=4, init_blocks=init_blocks, local_blocks=local_blocks, decode_query_len=2
    )[0]
    for options in DISTINCT.values():
        actual = decode(*batch, init_blocks=init_blocks, local_blocks=local_blocks, options=tuple(options.items()))
        np.testing.assert_array_equal(actual, expected)


FLOATS = st.floats(width=32, allow_subnormal=False)  # which may tie with zero: docs/numerics.md


@given(st.lists(st.one_of(st.sampled_from(SPECIAL), FLOATS), min_size=40, max_size=40), st.integers(0, 40))
def test_selection_is_the_total_order(scores, visible):
    score = np.asarray(scores, np.float32)
    ids = m3_pallas.minimax_m3_index_topk(
        jnp.asarray(score)[None, None], jnp.array([0, 1], jnp.int32), jnp.array([visible * 128 - 128], jnp.int32),
        1, 16, 0, 0,
    )[0, 0]  # fmt: skip
    # A row at position 0 or below still sees its own block.
    expected = reference.select(score[: max(visible, 1)], 16)
    assert ids.tolist() == expected + [-1] * (16 - len(expected))


@given(batches(), st.randoms(use_true_random=False))
def test_renumbering_pages_changes_nothing(batch, random):
    queries, pages, table, seq_lens = batch
    order = list(range(PAGES))
    random.shuffle(order)
    moved = np.empty_like(pages)
    moved[order] = pages
    expected = decode(*batch)
    np.testing.assert_array_equal(decode(queries, moved, np.asarray(order, np.int32)[table], seq_lens), expected)


@given(batches(), st.permutations(range(3)))
def test_permuting_requests_permutes_answers(batch, order):
    queries, pages, table, seq_lens = batch
    order = np.asarray(order)
    rows = (order[:, None] * 2 + np.arange(2)).reshape(-1)
    ids = decode(queries[rows], pages, table[order], seq_lens[order])
    np.testing.assert_array_equal(ids, decode(*batch)[:, rows])


@given(batches())
def test_speculative_rows_equal_single_tokens(batch):
    queries, pages, table, seq_lens = batch
    ids = np.asarray(decode(*batch))
    for j in range(2):
        single = decode(queries[j::2], pages, table, np.maximum(seq_lens - 1 + j, 0), query_len=1)
        np.testing.assert_array_equal(ids[:, j::2], single)


@given(batches())
def test_prefill_row_equals_decode_at_its_position(batch):
    queries, pages, table, seq_lens = batch
    seq_lens = np.maximum(seq_lens, 2)
    starts = np.arange(4, dtype=np.int32) * 2
    prefix = seq_lens - 2
    score = m3_pallas.minimax_m3_index_score(queries, pages, table, starts, seq_lens, prefix, 2, BLOCKS * 128, 2)
    ids = m3_pallas.minimax_m3_index_topk(score, starts, prefix, 2, 4, 0, 1)
    np.testing.assert_array_equal(ids, decode(queries, pages, table, seq_lens))


@given(batches(), st.integers(1, 4))
def test_forced_blocks_are_selected(batch, local_blocks):
    *_, seq_lens = batch
    ids = np.asarray(decode(*batch, local_blocks=local_blocks))
    for row, _, position in reference.decode_rows(seq_lens, 2):
        blocks = position // 128 + 1 if position >= 0 else 0
        for head in range(2):
            assert set(range(max(0, blocks - local_blocks), blocks)) <= set(ids[head, row].tolist())
            assert (ids[head, row] >= 0).sum() == min(4, blocks)


@st.composite
def chunks(draw):
    """A ragged prefill batch of three requests, some empty, and padding rows: 24 rows in all."""
    queries, pages, table, _ = draw(batches())
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 8]), min_size=3, max_size=3))
    prefixes = draw(st.lists(st.sampled_from([0, 1, 120, 127, 128, 129, 300, 600]), min_size=3, max_size=3))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    prefix = np.asarray(prefixes, np.int32)
    rows = np.concatenate([queries] * 4)
    rows[starts[-1] :] = np.nan
    return rows, pages, table, starts, prefix + np.diff(starts), prefix


@functools.partial(jax.jit, static_argnames=("call", "options"))
def prefill(*arrays, call, options=(), out=None):
    shared = dict(max_query_len=8, max_seq_len=BLOCKS * 128, num_kv_heads=2, **dict(options))
    if call == "combined":
        return m3_pallas.minimax_m3_index_prefill(*arrays, topk=4, init_blocks=1, local_blocks=1, out=out, **shared)
    score = m3_pallas.minimax_m3_index_score(*arrays, **shared)
    select = functools.partial(m3_pallas.minimax_m3_index_topk, score, arrays[3], arrays[5], 8, 4, 1, 1)
    return score, select(**dict(options))


@given(chunks())
def test_ragged_prefill_equals_the_oracle(arrays):
    score = reference.index_score(*arrays, max_seq_len=BLOCKS * 128)
    ids = reference.index_topk(score, arrays[3], arrays[5], topk=4, init_blocks=1, local_blocks=1)
    for options in DISTINCT.values():
        options = tuple(options.items())
        actual = prefill(*arrays, call="two", options=options)
        np.testing.assert_array_equal(actual[0], score)  # sums of small integers are exact
        np.testing.assert_array_equal(actual[1], ids)


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_combined_prefill_in_slices_of_any_size(rows, monkeypatch):
    monkeypatch.setattr(m3_pallas.prefill, "SLICE_BYTES", rows * 4 * 2 * (16 + 16))  # scores, candidates
    jax.clear_caches()

    @settings(max_examples=6)
    @given(chunks())
    def equals_two_calls(arrays):
        ids = prefill(*arrays, call="two")[1]
        np.testing.assert_array_equal(prefill(*arrays, call="combined"), ids)
        buffer = prefill(*arrays, call="combined", out=np.full((2, 30, 4), 7, np.int32))
        np.testing.assert_array_equal(buffer[:, :24], ids)
        np.testing.assert_array_equal(buffer[:, 24:], 7)

    equals_two_calls()
    jax.clear_caches()
