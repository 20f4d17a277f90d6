"""The oracle on tables worked by hand."""

import numpy as np
import pytest

from m3_pallas import reference

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("scores", "topk", "expected"),
    [
        ([0.0, -0.0, 0.0], 3, [0, 1, 2]),
        ([NAN, 1.0], 2, [1, 0]),
        ([-2e30, NAN, -INF], 3, [1, 0, 2]),
        ([5.0, INF, 5.0, 1e30], 3, [1, 3, 0]),
        ([1.0, 1.0 + 2**-12, np.nextafter(np.float32(1), np.float32(2))], 3, [1, 2, 0]),
        ([7.0] * 5, 3, [0, 1, 2]),
        ([2.0], 4, [0]),
        ([], 4, []),
    ],
)
def test_select(scores, topk, expected):
    assert list(reference.select(np.asarray(scores, np.float32), topk)) == expected


@pytest.mark.parametrize(
    ("num_blocks", "init_blocks", "local_blocks", "init", "local"),
    [
        (4, 1, 1, [0], [3]),
        (4, 3, 3, [0], [1, 2, 3]),
        (2, 5, 0, [0, 1], []),
        (2, 5, 5, [], [0, 1]),
        (1, 1, 1, [], [0]),
        (3, 0, 0, [], []),
    ],
)
def test_force(num_blocks, init_blocks, local_blocks, init, local):
    expected = np.zeros(num_blocks, np.float32)
    expected[init], expected[local] = 1e30, 1e29
    np.testing.assert_array_equal(
        reference.force(np.zeros(num_blocks, np.float32), init_blocks, local_blocks), expected
    )


def test_decode_by_hand():
    """Keys of D 2 whose products with the query (1, 10) can be read off; 130 tokens, so block 1 shows two."""
    pages = np.full((4, 128, 2), NAN, np.float32)
    pages[2] = 0  # block 0
    pages[2, 5] = 3, 0
    pages[2, 127] = 0, 0.5
    pages[1, :2] = [[4, 0], [1, 0.4]]  # block 1; the rest is stale
    table = np.array([[2, 1, 2**30]], np.int32)
    query = np.array([[[1, 10], [1, -10]]], np.float32)  # two heads
    ids, score = reference.index_decode(
        query, pages, table, np.array([130]), topk=3, init_blocks=0, local_blocks=0, decode_query_len=1
    )
    np.testing.assert_array_equal(score[:, 0], [[5, 5, -INF], [3, 4, -INF]])
    np.testing.assert_array_equal(ids[:, 0], [[0, 1, -1], [1, 0, -1]])


def test_score_by_hand():
    """A chunk of two tokens at positions 127 and 128, between padding rows' neighbours."""
    pages = np.full((2, 128, 1), NAN, np.float32)
    pages[1, :, 0] = np.arange(128)
    pages[0, 0] = -7
    score = reference.index_score(
        np.array([[[2]], [[1]], [[1]]], np.float32),
        pages,
        np.array([[1, 0]], np.int32),
        np.array([0, 2]),
        np.array([129]),
        np.array([127]),
        max_seq_len=129,
    )
    expected = np.full((1, 3, 16), -INF, np.float32)
    expected[0, 0, 0], expected[0, 1, :2] = 254, (127, -7)
    np.testing.assert_array_equal(score, expected)
