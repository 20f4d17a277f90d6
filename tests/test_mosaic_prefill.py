"""The TPU prefill kernels, interpreted with race, bounds and initialisation checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import m3_pallas
from m3_pallas import reference
from m3_pallas.measure import calls
from m3_pallas.measure.cases import CASES, Prefill, prefill_inputs
from tests.test_known_faults import ORDERS, check_prefill, select

pytestmark = pytest.mark.usefixtures("no_races")
INTERPRETED = dict(implementation="pallas_mosaic_tpu", interpret=True)
GOLDEN = ["prefill_ragged", "prefill_off_by_one_prefix", "prefill_empty_request", "prefill_long_prefix"]
FAULTS = {
    "two tiles, the second shared": Prefill(query_lens=(130, 1, 2), prefix_lens=(0, 1000, 127), heads=4, topk=3),
    "three chunks": Prefill(query_lens=(2, 1), prefix_lens=(128 * 257, 128 * 128), topk=5),
    "float32, three heads": Prefill(query_lens=(9, 0), prefix_lens=(250, 0), dtype="f32", heads=3, topk=3),
    "float8": Prefill(query_lens=(9, 3), prefix_lens=(250, 0), dtype="e4m3fn", heads=2, topk=3),
}


@pytest.mark.parametrize("case", [*GOLDEN, *FAULTS])
def test_prefill(case):
    check_prefill(FAULTS.get(case) or CASES[case], **INTERPRETED)


def test_padding_rows_and_nan_blocks():
    case = Prefill(query_lens=(5, 3), prefix_lens=(250, 0), topk=4, heads=2, seed=111)
    inputs = prefill_inputs(case)
    inputs["idx_q"] = np.concatenate([inputs["idx_q"], np.full_like(inputs["idx_q"][:4], np.nan)])
    inputs["index_kv_cache"][inputs["block_table"][0, 0]] = np.nan
    score, ids = check_prefill(case, inputs, **INTERPRETED)
    assert (np.asarray(score[:, :5, 0]) == np.float32(-1e30)).all()
    assert (np.asarray(ids[:, 8:]) == -1).all()


@pytest.mark.parametrize("name", ORDERS)
def test_order(name):
    scores, topk, expected = ORDERS[name]
    assert select(scores, topk, **INTERPRETED) == expected


def test_selection_over_chunks_and_tiles():
    """Rows of one block to three chunks, with ties, in two tiles of rows."""
    rng = np.random.default_rng(401)
    blocks = rng.permutation(np.r_[1:70, 250:330, 505:520]).astype(np.int32)
    score = rng.integers(-20, 20, (2, blocks.size + 1, 519)).astype(np.float32)
    starts = np.arange(blocks.size + 1, dtype=np.int32)
    arrays = (score, starts, blocks * 128 - 1)
    ids = m3_pallas.minimax_m3_index_topk(*map(jnp.asarray, arrays), 1, 9, 1, 2, **INTERPRETED)
    expected = reference.index_topk(*arrays, topk=9, init_blocks=1, local_blocks=2)
    np.testing.assert_array_equal(ids, expected)


TOKENS, BLOCKS = 150, 5
PAGES = np.random.default_rng(402).integers(-1, 2, (12, 128, 128)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="options")
def combined(*arrays, options):
    return m3_pallas.minimax_m3_index_prefill(*arrays, TOKENS, BLOCKS * 128, 4, 1, 1, 4, **dict(options))


@settings(max_examples=8)
@given(st.data())
def test_combined_call_on_ragged_batches(data):
    """Tiles that several requests share, empty requests, padding rows; sums of small integers are exact."""
    cuts = st.sampled_from([0, 1, 3, 60, 127, 128, 129, TOKENS])
    starts = np.array([0, *sorted(data.draw(st.lists(cuts, min_size=3, max_size=3)))], np.int32)
    prefixes = st.sampled_from([0, 1, 127, 128, 300, 490])
    prefix = np.array(data.draw(st.lists(prefixes, min_size=3, max_size=3)), np.int32)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    queries = rng.integers(-1, 2, (TOKENS, 4, 128)).astype(np.float32)
    queries[starts[-1] :] = np.nan
    table = rng.integers(0, 12, (3, BLOCKS)).astype(np.int32)
    arrays = (queries, PAGES, table, starts, prefix + np.diff(starts), prefix)
    score = reference.index_score(*arrays, max_seq_len=BLOCKS * 128)
    ids = reference.index_topk(score, starts, prefix, topk=4, init_blocks=1, local_blocks=1)
    np.testing.assert_array_equal(combined(*arrays, options=tuple(INTERPRETED.items())), ids)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("seq_lens", 0, 2**31 - 1),
        ("prefix_lens", 0, 2**31 - 1),
        ("prefix_lens", 0, -5),
        ("block_table", (0, 0), 2**31 - 1),
        ("cu_seqlens_q", 1, -9),
        ("cu_seqlens_q", 0, 7),
        ("cu_seqlens_q", 2, 2**30),
    ],
)
def test_callers_hazards_stay_inside(name, index, value):
    """The interpreter raises on any access out of bounds; every copy that starts is awaited."""
    inputs = prefill_inputs(Prefill(query_lens=(5, 3), prefix_lens=(250, 700), heads=2, seed=112))
    inputs["index_kv_cache"] = np.nan_to_num(inputs["index_kv_cache"].astype(np.float32))
    inputs["idx_q"] = inputs["idx_q"].astype(np.float32)
    inputs[name][index] = value
    score = m3_pallas.minimax_m3_index_score(**inputs, num_kv_heads=2, **INTERPRETED)
    # A page that was never copied, or not awaited, holds NaN, which would count as -1e30.
    assert not np.isnan(score).any()
    assert (np.asarray(score) != -1e30).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_dim=64), "head dim 64 is not a multiple of 128"),
        (dict(dtype="f16"), "idx_q of float16 is not served, no TPU loads it"),
        (dict(heads=9), "9 heads are above 8"),
        (dict(head_dim=1024), "these shapes need 40632320 bytes of VMEM, above 33554432"),
    ],
)
def test_what_it_cannot_serve(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        calls.prefill(Prefill(query_lens=(2,), prefix_lens=(130,), **changes), **INTERPRETED)


def test_what_selection_cannot_serve():
    score = jnp.zeros((1, 1, 24577))
    with pytest.raises(NotImplementedError, match="24577 blocks are above 24576"):
        m3_pallas.minimax_m3_index_topk(
            score, jnp.zeros(2, jnp.int32), jnp.zeros(1, jnp.int32), 1, 4, 0, 1, **INTERPRETED
        )  # fmt: skip
