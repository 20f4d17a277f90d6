"""Every launch gives the oracle's ids, whatever GPU it was tuned for: interpreted, or compiled where there is a GPU."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m3_pallas
from m3_pallas import policy, reference
from m3_pallas.measure import calls
from m3_pallas.measure.cases import CASES, Decode, Prefill, decode_inputs, prefill_inputs

ON_GPU = jax.default_backend() == "gpu"
SHORT = (
    "decode_block_edges",
    "decode_spec_three_of_five",
    "decode_ties",
    "decode_k32",
    "decode_table_stride16_spec",
)
NAMES = [name for name, case in CASES.items() if isinstance(case, Decode)] if ON_GPU else SHORT
OVERRIDES = {
    "merge": policy.DecodeLaunch(
        score=policy.SplitScore(num_chunks=3, min_columns=8),
        selection=policy.Selection(num_chunks=16, tile=64, num_warps=4, num_stages=1),
    ),
    "adaptive merge of tiles": policy.DecodeLaunch(
        score=policy.BalancedScore(budget=5, tile_tokens=64),
        selection=policy.Selection(num_chunks=2, tile=64, num_warps=4, num_stages=1, adaptive_merge=True),
    ),
}


def check(case, **options):
    inputs = decode_inputs(case)
    result = calls.decode(case, inputs, implementation="pallas_triton", interpret=not ON_GPU, **options)
    ids = result if case.table_stride is None else result.topk_idx
    np.testing.assert_array_equal(ids, calls.decode_oracle(case, inputs)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_architecture(arch, name):
    case = CASES[name]
    inputs = decode_inputs(case)
    launch = policy.decode_launch(
        arch=arch,
        requests=len(case.seq_lens),
        heads=case.heads,
        tokens=len(case.seq_lens) * case.query_len,
        num_blocks=policy.ceil_div(inputs["max_seq_len"], 128),
        topk=case.topk,
        head_dim=case.head_dim,
        query_dtype=inputs["idx_q"].dtype.name,
        cache_dtype=inputs["index_kv_cache"].dtype.name,
        max_decode_query_len=case.max_query_len,
    )
    check(case, launch=launch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("launch", OVERRIDES)
def test_override(launch, name):
    check(CASES[name], launch=OVERRIDES[launch])


RAGGED = Prefill(query_lens=(1, 0, 70, 9), prefix_lens=(1000, 700, 330, 0), heads=3, topk=5, head_dim=16, seed=300)
SCORES = {  # a program owns every block of its tile, some, or one
    "one chunk": policy.ScoreLaunch(rows=64, num_chunks=1),
    "three chunks": policy.ScoreLaunch(rows=16, num_chunks=3),
    "more chunks than blocks": policy.ScoreLaunch(rows=128, num_chunks=40),
}
OPTIONS = dict(implementation="pallas_triton", interpret=not ON_GPU)


def ragged_inputs():
    """`RAGGED` with three padding rows of NaN."""
    inputs = prefill_inputs(RAGGED)
    inputs["idx_q"] = np.concatenate([inputs["idx_q"], np.full_like(inputs["idx_q"][:3], np.nan)])
    return inputs


def score_ragged(inputs, launch):
    return m3_pallas.minimax_m3_index_score(**inputs, num_kv_heads=RAGGED.heads, launch=SCORES[launch], **OPTIONS)


@pytest.mark.parametrize("launch", SCORES)
def test_prefill_score(launch):
    inputs = ragged_inputs()
    expected, _ = calls.prefill_oracle(RAGGED, inputs)
    tolerance = calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
    calls.assert_scores(score_ragged(inputs, launch), expected, tolerance)


@pytest.mark.parametrize("launch", SCORES)
def test_prefill_score_of_blocks_below_what_nan_counts_as(launch):
    """Whole visible blocks of NaN, of -inf and of both: a plain maximum falls short there."""
    inputs = ragged_inputs()
    inputs["idx_q"] = np.abs(inputs["idx_q"])
    pages, table = inputs["index_kv_cache"], inputs["block_table"]
    pages[table[2, 0]] = np.nan
    pages[table[2, 1]] = -np.inf
    pages[table[0, 3]] = -np.inf
    pages[table[0, 3], 17] = np.nan
    pages[table[0, 5], 40] = np.nan  # among others, NaN does not count
    score = score_ragged(inputs, launch)
    expected, _ = calls.prefill_oracle(RAGGED, inputs)
    for row, block, value in ((20, 0, -1e30), (20, 1, -np.inf), (0, 3, -1e30)):
        np.testing.assert_array_equal(expected[:, row, block], np.float32(value))
        np.testing.assert_array_equal(score[:, row, block], np.float32(value))
    np.testing.assert_array_equal(np.isneginf(score), np.isneginf(expected))
    normal = expected > -1e29
    np.testing.assert_allclose(np.asarray(score)[normal], expected[normal], rtol=1e-5)


def select(score, blocks, topk, *, tile=256, init_blocks=0, local_blocks=1):
    """Ids of rows that see `blocks` blocks each, and the oracle's."""
    starts = np.arange(blocks.size + 1, dtype=np.int32)
    arrays = (score, starts, blocks * 128 - 1)
    launch = policy.TopkLaunch(groups=32, tile=tile, num_warps=1, num_stages=1)
    ids = m3_pallas.minimax_m3_index_topk(
        *map(jnp.asarray, arrays), 1, topk, init_blocks, local_blocks, launch=launch, **OPTIONS
    )
    return ids, reference.index_topk(*arrays, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks)


ROWS = np.array([1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 200, 256, 257, 400], np.int32)


@pytest.mark.parametrize(
    ("tile", "topk", "forced"),
    [(256, 16, (0, 1)), (64, 16, (1, 2)), (256, 5, (3, 300)), (128, 1, (0, 0)), (256, 33, (0, 1))],
)
def test_prefill_selection(tile, topk, forced):
    """Rows of one block to several tiles, with a row past the last request and garbage in the hidden columns."""
    rng = np.random.default_rng(301)
    score = rng.standard_normal((2, ROWS.size + 1, 400)).astype(np.float32)
    score[1] = rng.integers(-20, 20, score[1].shape)  # ties
    score[:, np.arange(400) >= np.append(ROWS, 0)[:, None]] = np.nan
    ids, expected = select(score, ROWS, topk, tile=tile, init_blocks=forced[0], local_blocks=forced[1])
    np.testing.assert_array_equal(ids, expected)


COLUMNS = np.arange(400)
CROWDED = {
    "equal": np.zeros(400),
    "few values": COLUMNS % 3,
    "one group": np.where(COLUMNS % 128 < 4, 1000 - COLUMNS, -COLUMNS),
    "few groups": np.where(COLUMNS % 128 < 48, COLUMNS, -COLUMNS),
    "just too many": np.where(COLUMNS % 128 < 60, 5, COLUMNS / 500),
    "rising": COLUMNS,
    "falling": -COLUMNS,
    "nothing": np.full(400, -np.inf),
    "NaN": np.full(400, np.nan),
    "NaN among lower": np.where(COLUMNS % 7, -2e30, np.nan),
    "NaN among higher": np.where(COLUMNS % 7, COLUMNS, np.nan),
    "infinite": np.where(COLUMNS % 5, COLUMNS, np.inf),
    "zeros": np.where(COLUMNS % 2, 0.0, -0.0),
}


def test_prefill_selection_where_more_reach_the_bound_than_scratch_holds():
    score = np.stack([np.broadcast_to(row, (ROWS.size, 400)) for row in CROWDED.values()]).astype(np.float32)
    ids, expected = select(score, ROWS, 16)
    for name, head, right in zip(CROWDED, ids, expected, strict=True):
        np.testing.assert_array_equal(head, right, err_msg=name)


def test_combined_prefill_repeats_no_rows():
    """Slices of even size: 2844 tokens fit, but three of 2731 make up 8192."""
    tokens, heads, context = 8192, 4, 131072
    shape, i32 = jax.ShapeDtypeStruct, jnp.int32
    arrays = (
        shape((tokens, heads, 128), jnp.bfloat16), shape((8, 128, 128), jnp.bfloat16),
        shape((1, context // 128), i32), shape((2,), i32), shape((1,), i32), shape((1,), i32),
    )  # fmt: skip
    with mock.patch.object(
        m3_pallas.prefill, "minimax_m3_index_score", wraps=m3_pallas.minimax_m3_index_score
    ) as score:
        jax.eval_shape(
            lambda *a: m3_pallas.minimax_m3_index_prefill(*a, tokens, context, 16, 0, 1, heads), *arrays
        )  # fmt: skip
    assert {call.args[0].shape[0] for call in score.call_args_list} == {2731}
