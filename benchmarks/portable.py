"""The portable implementation on this CPU against the usual XLA way: gather every page, one einsum, `lax.top_k`.

    python -m benchmarks.portable [--json FILE]

Same arrays, jitted, runs of the two alternating; the least of the times of each, by the host's clock.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import m3_pallas
from m3_pallas.measure import environment, xla_way
from m3_pallas.measure.output import write_json
from m3_pallas.measure.shapes import PORTABLE, decode_arrays

RUNS = 25


def least_ms(functions: list, arrays: tuple) -> list[float]:
    for function in functions:
        jax.block_until_ready(function(*arrays))
    least = [float("inf")] * len(functions)
    for _ in range(RUNS):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function(*arrays))
            least[i] = min(least[i], (time.perf_counter() - start) * 1e3)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows here")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, {os.cpu_count()} CPUs, {platform.machine()}")
    print(f"{'shape':<24}{'xla ms':>9}{'usual ms':>10}{'ratio':>7}")
    rows = []
    for shape in PORTABLE:
        queries, *rest = decode_arrays(shape, 1)
        arrays = (queries[0], *rest)
        statics = shape.statics
        ours = jax.jit(lambda *a, s=statics: m3_pallas.minimax_m3_index_decode(*a, *s, implementation="xla"))
        usual = jax.jit(lambda *a, s=statics: xla_way.decode(*a, *s))
        if not (ours(*arrays) == usual(*arrays)).all():
            raise SystemExit(f"{shape}: the two ways select different blocks")
        ours_ms, usual_ms = least_ms([ours, usual], arrays)
        rows.append({"shape": str(shape), "xla_ms": ours_ms, "usual_ms": usual_ms, "ratio": usual_ms / ours_ms})
        print(f"{shape!s:<24}{ours_ms:9.2f}{usual_ms:10.2f}{usual_ms / ours_ms:7.2f}", flush=True)
    if options.json:
        write_json(options.json, environment.describe() | {"cpus": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
