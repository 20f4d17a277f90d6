"""Every launch gives the oracle's ids, whatever GPU it was tuned for: interpreted, or compiled where there is a GPU."""

import jax
import numpy as np
import pytest

from m3_pallas import policy
from tests import calls
from tests.cases import CASES, Decode, decode_inputs

ON_GPU = jax.default_backend() == "gpu"
SHORT = (
    "decode_block_edges",
    "decode_spec_three_of_five",
    "decode_ties",
    "decode_k32",
    "decode_shared_pages",
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
