"""The TPU kernels, interpreted with race, bounds and initialisation checks; and compiled where libtpu is installed."""

import functools
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m3_pallas
from m3_pallas.measure import calls
from m3_pallas.measure.cases import CASES, Decode, decode_inputs, golden
from tests import mosaic_compile

pytestmark = pytest.mark.usefixtures("no_races")
INTERPRETED = dict(implementation="pallas_mosaic_tpu", interpret=True)
GOLDEN = [
    "decode_block_edges",
    "decode_zero_length_rows",
    "decode_spec_three_of_five",
    "decode_init_and_local",
    "decode_nan_query",
    "decode_k12",
    "decode_table_stride16_spec",
]
FAULTS = {
    "stale entries": Decode(seq_lens=(129, 5, 256), topk=3, seed=104),
    "short requests": Decode(seq_lens=(2, 129), query_len=4, max_query_len=4, topk=3, seed=108),
    "three heads": Decode(seq_lens=(700, 300), heads=3, topk=3, seed=102),
    "float32": Decode(seq_lens=(700, 300), heads=2, topk=3, seed=102, dtype="f32"),
    "float8": Decode(seq_lens=(700, 300), heads=2, topk=3, seed=102, dtype="e4m3fn"),
    "ties in two pieces": Decode(seq_lens=(128 * 270,), values="zero_query", pages=3, seed=10),
}


@pytest.mark.parametrize("name", [*GOLDEN, *FAULTS])
def test_decode(name):
    case = FAULTS.get(name) or CASES[name]
    inputs = decode_inputs(case)
    result = calls.decode(case, inputs, **INTERPRETED)
    ids = result if case.table_stride is None else result.topk_idx
    np.testing.assert_array_equal(ids, calls.decode_oracle(case, inputs)[0])
    if case.table_stride is not None:
        for part in ("sparse_block_table", "sparse_context_lens"):
            np.testing.assert_array_equal(getattr(result, part), golden()[f"{name}/{part}"])


@pytest.mark.parametrize(("name", "value"), [("seq_lens", 2**31 - 1), ("block_table", -7)])
def test_callers_hazards_stay_inside(name, value):
    """The interpreter raises on any access out of bounds."""
    case = Decode(seq_lens=(300, 700), topk=3, seed=112)
    inputs = decode_inputs(case)
    expected = calls.decode_oracle(case, inputs)[0]
    inputs[name][0] = value
    ids = np.asarray(calls.decode(case, inputs, **INTERPRETED))
    np.testing.assert_array_equal(ids[:, 1], expected[:, 1])
    assert ids.max() < inputs["block_table"].shape[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head_dim=64), "head dim 64 is not a multiple of 128"),
        (dict(dtype="f16"), "idx_q of float16 is not served, no TPU loads it"),
        (dict(heads=129), "129 heads of 1 query tokens are above 128 rows"),
        (dict(head_dim=4096), "these shapes need 35799040 bytes of VMEM, above 33554432"),
    ],
)
def test_what_it_cannot_serve(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        calls.decode(Decode(seq_lens=(130,), **changes), **INTERPRETED)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compile gates need libtpu")
def test_compiles_for_tpus():
    """v5e, v6e and tpu7x: compiles, so VMEM suffices, and keeps no copy in HBM."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mosaic_compile"],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(tuple(mosaic_compile.TOPOLOGIES))]
    assert len(rows) == len(mosaic_compile.TOPOLOGIES) * len(mosaic_compile.CALLS)
    for *_, temporaries in rows:
        assert int(temporaries) <= 64 << 20


BATCHED = {
    "queries": (0, None, None, None),
    "pages": (0, 0, None, None),
    "tables and lengths": (0, None, 0, 0),
}


@pytest.mark.parametrize("axes", BATCHED)
def test_vmap(axes):
    """Interpreted, and lowered for a TPU: with None it has to work whatever is batched."""
    case = Decode(seq_lens=(130, 300), heads=2, topk=3, seed=105)
    inputs = decode_inputs(case)
    arrays = [jnp.asarray(inputs[name]) for name in ("idx_q", "index_kv_cache", "block_table", "seq_lens")]
    axes = BATCHED[axes]
    batched = [x if axis is None else jnp.stack([x, x]) for x, axis in zip(arrays, axes, strict=True)]

    def decode(*arrays, **options):
        return m3_pallas.minimax_m3_index_decode(*arrays, 300, 3, 0, 1, 2, 1, 1, **options)

    ids = jax.jit(jax.vmap(functools.partial(decode, **INTERPRETED), in_axes=axes))(*batched)
    for sample in ids:
        np.testing.assert_array_equal(sample, calls.decode_oracle(case, inputs)[0])
    lowered = jax.jit(jax.vmap(decode, in_axes=axes)).trace(*batched).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
