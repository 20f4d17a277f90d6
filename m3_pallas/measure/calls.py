"""Run a case on an implementation or on the oracle, and compare answers."""

import jax
import numpy as np

import m3_pallas
from m3_pallas import reference
from m3_pallas.measure.cases import Decode, Prefill, decode_inputs, prefill_inputs


def decode(case: Decode, inputs: dict | None = None, **options):
    """`minimax_m3_index_decode` on a case: the ids, or the result tuple where the case asks for a table."""
    inputs = dict(decode_inputs(case) if inputs is None else inputs)
    if case.table_stride is not None:
        options["block_page_stride"] = case.table_stride
    return m3_pallas.minimax_m3_index_decode(
        **inputs,
        topk=case.topk,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        num_kv_heads=case.heads,
        decode_query_len=case.query_len,
        max_decode_query_len=case.max_query_len,
        **options,
    )


def decode_oracle(case: Decode, inputs: dict | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and forced scores of the oracle."""
    inputs = decode_inputs(case) if inputs is None else inputs
    return reference.index_decode(
        inputs["idx_q"],
        inputs["index_kv_cache"],
        inputs["block_table"],
        inputs["seq_lens"],
        topk=case.topk,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        decode_query_len=case.query_len,
    )


def prefill_score(case: Prefill, inputs: dict, **options) -> jax.Array:
    """Scores of `minimax_m3_index_score` on a case."""
    return m3_pallas.minimax_m3_index_score(**inputs, num_kv_heads=case.heads, **options)


def prefill_topk(case: Prefill, inputs: dict, score, **options) -> jax.Array:
    """Ids of `minimax_m3_index_topk` on a case."""
    return m3_pallas.minimax_m3_index_topk(
        score,
        inputs["cu_seqlens_q"],
        inputs["prefix_lens"],
        inputs["max_query_len"],
        case.topk,
        case.init_blocks,
        case.local_blocks,
        **options,
    )


def prefill(case: Prefill, inputs: dict | None = None, **options) -> tuple[jax.Array, jax.Array]:
    """Scores and ids of the two calls on a case."""
    inputs = prefill_inputs(case) if inputs is None else inputs
    score = prefill_score(case, inputs, **options)
    return score, prefill_topk(case, inputs, score, **options)


def prefill_oracle(case: Prefill, inputs: dict | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ids of the oracle."""
    inputs = prefill_inputs(case) if inputs is None else inputs
    arrays = {k: v for k, v in inputs.items() if k != "max_query_len"}
    score = reference.index_score(**{"pages" if k == "index_kv_cache" else k: v for k, v in arrays.items()})
    ids = reference.index_topk(
        score,
        inputs["cu_seqlens_q"],
        inputs["prefix_lens"],
        topk=case.topk,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
    )
    return score, ids


def score_tolerance(idx_q: np.ndarray, pages: np.ndarray) -> float:
    """How far two float32 sums of the same D exact products may differ, in whatever order they add.

    Each is within `D * 2**-24 * sum(|q| * |k|)` of the true sum (products of float32 inputs round once more); the
    largest sum over all rows and keys bounds it, NaN poison left out.
    """
    queries = np.abs(np.nan_to_num(idx_q.astype(np.float32))).reshape(-1, idx_q.shape[-1])
    keys = np.abs(np.nan_to_num(pages.astype(np.float32))).reshape(-1, pages.shape[-1])
    largest = max(float((keys @ query).max()) for query in queries)
    return 2 * (idx_q.shape[-1] + 1) * 2.0**-24 * largest


def assert_scores(actual, expected: np.ndarray, tolerance: float) -> None:
    """Scores within `tolerance`, and -inf in exactly the same places."""
    actual = np.asarray(actual)
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    finite = ~np.isneginf(expected)
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=tolerance)
