"""vLLM's own answers, reproduced by the oracle and by every implementation."""

import numpy as np
import pytest

from m3_pallas import reference
from m3_pallas.measure import calls, cases
from m3_pallas.measure.cases import CASES, Decode, Prefill, decode_inputs, prefill_inputs
from tests.conftest import IMPLEMENTATIONS

GOLDEN = cases.golden()
DECODE = [name for name, case in CASES.items() if isinstance(case, Decode)]
PREFILL = [name for name, case in CASES.items() if isinstance(case, Prefill)]
WITH_TABLE = [name for name in DECODE if CASES[name].table_stride is not None]


def assert_ids(actual, name: str) -> None:
    """The golden ids as lists; as sets where vLLM leaves the order of two forced prefill blocks open."""
    expected, actual = GOLDEN[f"{name}/topk"], np.asarray(actual)
    if isinstance(CASES[name], Prefill) and CASES[name].local_blocks >= 2:
        expected, actual = np.sort(expected), np.sort(actual)
    np.testing.assert_array_equal(actual, expected)


def written(name: str) -> np.ndarray:
    """Where vLLM's kernel wrote a score."""
    return ~np.isnan(GOLDEN[f"{name}/score"])


@pytest.mark.parametrize("name", [name for name in DECODE if name != "decode_k1"])
def test_oracle_decode(name):
    case = CASES[name]
    inputs = decode_inputs(case)
    ids, score = calls.decode_oracle(case, inputs)
    assert_ids(ids, name)
    if case.keep_score and case.values != "nan_query":
        golden, mask = GOLDEN[f"{name}/score"], written(name)
        ours = score[..., : golden.shape[-1]]
        tolerance = calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
        calls.assert_scores(ours[mask], golden[mask], tolerance)


@pytest.mark.parametrize("name", PREFILL)
def test_oracle_prefill(name):
    inputs = prefill_inputs(CASES[name])
    score, ids = calls.prefill_oracle(CASES[name], inputs)
    golden, mask = GOLDEN[f"{name}/score"], written(name)
    tolerance = calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
    calls.assert_scores(score[..., : golden.shape[-1]][mask], golden[mask], tolerance)
    assert_ids(ids, name)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_oracle_table(name):
    case, inputs = CASES[name], decode_inputs(CASES[name])
    ids = GOLDEN[f"{name}/topk"]
    for row, request, position in reference.decode_rows(inputs["seq_lens"], case.query_len):
        table, length = reference.sparse_block_table(
            ids[0, row], inputs["attention_block_table"][request], position, case.table_stride
        )
        np.testing.assert_array_equal(table, GOLDEN[f"{name}/sparse_block_table"][row])
        assert length == GOLDEN[f"{name}/sparse_context_lens"][row]


@pytest.mark.parametrize("chosen", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, chosen):
    result = calls.decode(CASES[name], **IMPLEMENTATIONS[chosen])
    if name in WITH_TABLE:
        np.testing.assert_array_equal(result.sparse_block_table, GOLDEN[f"{name}/sparse_block_table"])
        np.testing.assert_array_equal(result.sparse_context_lens, GOLDEN[f"{name}/sparse_context_lens"])
        result = result.topk_idx
    if name == "decode_k1":
        np.testing.assert_array_equal(result, calls.decode_oracle(CASES[name])[0])
    else:
        assert_ids(result, name)


@pytest.mark.parametrize("chosen", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name, chosen):
    inputs = prefill_inputs(CASES[name])
    score, ids = calls.prefill(CASES[name], inputs, **IMPLEMENTATIONS[chosen])
    expected, expected_ids = calls.prefill_oracle(CASES[name], inputs)
    tolerance = calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
    calls.assert_scores(score, expected, tolerance)
    np.testing.assert_array_equal(ids, expected_ids)
    assert_ids(ids, name)
