"""The page-16 tables, on rows worked by hand and against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from m3_pallas import build_sparse_block_table_decode, build_sparse_block_table_prefill, reference


def pages(*starts, width):
    row = [start + i for start in starts for i in range(8)]
    return row + [0] * (width - len(row))


# ids, position, block table, stride, table row, tokens
ROWS = {
    "tail last": ([2, 0, 1], 300, [7, 3, 5], 8, pages(56, 24, 40, width=24), 2 * 128 + 45),
    "stride 16": ([1, 0], 129, [7, 3], 16, pages(112, 48, width=16), 128 + 2),
    "no tail": ([0, 1], 300, [7, 3, 5], 8, pages(56, 24, width=16), 256),
    "wild ids between valid ones": ([0, -1, 1_000_000, 2, 1], 260, [7, 3, 5], 8, pages(56, 24, 40, width=40), 261),
    "past the own block": ([3, 2, 0], 300, [7, 3, 5, 9], 8, pages(56, 40, width=24), 128 + 45),
    "one token": ([0, -1], 0, [7], 8, pages(56, width=16), 1),
    "empty row": ([0, 1], -1, [7, 3], 8, pages(width=16), 0),
    "nothing selected": ([-1, -1], 300, [7, 3, 5], 8, pages(width=16), 0),
    "whole last block": ([1, 0], 255, [7, 3], 8, pages(56, 24, width=16), 256),
}


@pytest.mark.parametrize("name", ROWS)
def test_by_hand(name):
    ids, position, table, stride, expected, length = ROWS[name]
    ids, table = jnp.array([[ids]], jnp.int32), jnp.array([table], jnp.int32)
    for actual in (
        build_sparse_block_table_decode(ids, table, jnp.array([position + 1], jnp.int32), 1, stride),
        build_sparse_block_table_prefill(ids, table, jnp.zeros(1, jnp.int32), jnp.array([position], jnp.int32), stride),
    ):
        assert actual[0].tolist() == [expected]
        assert actual[1].tolist() == [length]


def test_against_oracle():
    rng = np.random.default_rng(0)
    seq_lens = np.array([0, 3, 500, 1300], np.int32)
    rows = list(reference.decode_rows(seq_lens, 4))
    table = rng.permutation(44).reshape(4, 11).astype(np.int32)
    ids = np.stack([rng.permutation(14)[:6] - 2 for _ in range(16)]).astype(np.int32)[None]  # distinct in a row
    actual, lens = build_sparse_block_table_decode(jnp.asarray(ids), jnp.asarray(table), jnp.asarray(seq_lens), 4, 8)
    for row, request, position in rows:
        expected, length = reference.sparse_block_table(ids[0, row], table[request], position, 8)
        np.testing.assert_array_equal(actual[row], expected, err_msg=f"row {row}")
        assert int(lens[row]) == length


def test_no_rows():
    table, lens = build_sparse_block_table_decode(
        jnp.zeros((1, 0, 4), jnp.int32), jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    )
    assert (table.shape, lens.shape) == ((0, 32), (0,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(topk_idx=jnp.zeros((2, 4, 3), jnp.int32)), ValueError, r"topk_idx must be \[1, T, K\].*\[2, 4, 3\]"),
        (dict(topk_idx=jnp.zeros((1, 4, 3))), TypeError, "topk_idx must be int32, got float32"),
        (dict(block_page_stride=4), ValueError, "block_page_stride must be 8 or 16, got 4"),
        (dict(seq_lens=jnp.zeros(3, jnp.int32)), ValueError, r"seq_lens must be \[R\] = \[4\].*\[3\]"),
        (dict(decode_query_len=3), ValueError, r"topk_idx must have R \* decode_query_len = 4 \* 3 rows"),
    ],
)
def test_refuses(changes, error, message):
    arguments = dict(
        topk_idx=jnp.zeros((1, 4, 3), jnp.int32),
        block_table=jnp.zeros((4, 5), jnp.int32),
        seq_lens=jnp.zeros(4, jnp.int32),
    )
    with pytest.raises(error, match=message):
        build_sparse_block_table_decode(**arguments | changes)
