"""Record the index queries and keys of `examples/decode_loop.py` as the data of `python -m m3_pallas check`.

    python -m benchmarks.record_tiny_m3

Of the last sparse layer, rounded to bfloat16. The queries of the longest prompt are left out, for size.
"""

from __future__ import annotations

import pathlib
import runpy
import sys

import jax
import ml_dtypes
import numpy as np

import m3_pallas
from m3_pallas.measure import calls, tiny_m3
from m3_pallas.measure.cases import Decode

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "decode_loop.py"


def record() -> dict[str, list[np.ndarray]]:
    """What every call of the example got, in order, of all sparse layers."""
    got: dict[str, list] = {"keys": [], "prefill": [], "decode": []}

    def recording(call, kind, argument):
        def run(*arguments, **options):
            jax.debug.callback(lambda x: got[kind].append(np.asarray(x)), arguments[argument], ordered=True)
            return call(*arguments, **options)

        return run

    originals = {}
    patches = {"insert_index_cache": ("keys", 1), "minimax_m3_index_score": ("prefill", 0)}
    for name, where in {**patches, "minimax_m3_index_decode": ("decode", 0)}.items():
        originals[name] = getattr(m3_pallas, name)
        setattr(m3_pallas, name, recording(originals[name], *where))
    sys.argv = [str(EXAMPLE)]
    state = runpy.run_path(str(EXAMPLE), run_name="__main__")
    jax.effects_barrier()
    for name, call in originals.items():
        setattr(m3_pallas, name, call)
    layers = len(state["decode_blocks"])
    got = {kind: arrays[layers - 1 :: layers] for kind, arrays in got.items()}
    return {**got, "prompt_lens": list(state["prompt_lens"]), "request": list(state["request"]), "topk": state["topk"]}


def main() -> None:
    got = record()
    chunks, steps = len(got["prefill"]), len(got["decode"])
    request = np.asarray(got["request"])  # of every prefill row of every chunk
    keys = np.concatenate(got["keys"][:chunks])
    queries = np.concatenate(got["prefill"])
    arrays = {"topk": np.int32(got["topk"])}
    for r, length in enumerate(got["prompt_lens"]):
        decoded = np.stack([step[r] for step in got["keys"][chunks : chunks + steps]])
        arrays[f"request{r}/index_k"] = np.concatenate([keys[request == r], decoded])
        arrays[f"request{r}/decode_q"] = np.stack([step[r] for step in got["decode"]])
        if length < max(got["prompt_lens"]):
            arrays[f"request{r}/prefill_q"] = queries[request == r]
    bits = {
        name: array.astype(ml_dtypes.bfloat16).view(np.uint16) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }
    np.savez_compressed(tiny_m3.FILE, **bits)
    check_gaps()


def check_gaps() -> None:
    """Ids are compared exactly: scores that a row chooses between must be further apart than rounding, some 1e-5."""
    for name, case, inputs in tiny_m3.cases():
        oracle = calls.decode_oracle if isinstance(case, Decode) else calls.prefill_oracle
        score = next(x for x in oracle(case, inputs) if x.dtype == np.float32)
        score = np.sort(score, axis=-1)[..., ::-1][..., : case.topk + 2]
        with np.errstate(invalid="ignore"):
            gaps = score[..., :-1] - score[..., 1:]
        tolerance = calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
        smallest = gaps[np.isfinite(gaps)].min()
        print(f"{name}: smallest gap {smallest:.1e}, tolerance {tolerance:.1e}")


if __name__ == "__main__":
    main()
