"""Decode on this GPU by device time: score, selection and whole call, against vLLM's kernels and the XLA way.

    python -m benchmarks.decode [--peers FOLDER] [--json FILE] [--only TEXT]

Every contender answers for the same arrays in the same process; ids are compared before times are. A row's time is
that of one call in a replayed graph of many calls with distinct queries. The read ceiling is a reduction over 2 GiB,
measured the same way.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import pathlib
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import m3_pallas
from benchmarks.peers import VARIANTS, Peers
from benchmarks.profiling import device_time, geometric_mean
from benchmarks.shapes import DECODE, TOPK, Shape, decode_arrays
from benchmarks.xla_way import gather_all

CEILING_BYTES = 2 << 30


def read_ceiling() -> float:
    """GB/s of XLA's own maximum over 2 GiB of bfloat16."""
    values = jnp.ones((8, CEILING_BYTES // 16), jnp.bfloat16)
    time = device_time(jax.jit(lambda x: jnp.max(jnp.abs(x), axis=1)), values, calls=1)
    return CEILING_BYTES / time.span / 1e3


def chain(call, calls: int):
    """One jitted function of `calls` calls, each on a query argument of its own."""
    return jax.jit(lambda queries, *rest: [call(q, *rest) for q in queries]), calls


def measure(call, arrays, calls: int):
    queries, *rest = arrays
    function, calls = chain(call, calls)
    return device_time(function, tuple(queries[i] for i in range(calls)), *rest, calls=calls)


def row(shape: Shape, ceiling: float, peers: Peers | None) -> dict:
    calls = 40 if shape.bytes < 2**29 else 16
    arrays = decode_arrays(shape, calls)
    queries, *rest = arrays
    ours = functools.partial(m3_pallas.minimax_m3_index_decode, implementation="pallas_triton")
    call = lambda q, *a: ours(q, *a, *shape.statics)  # noqa: E731
    time = measure(call, arrays, calls)
    inside = {name: us for name, us in time.kernels.items() if name.startswith("m3_decode")}
    score = sum(us for name, us in inside.items() if "score" in name)
    select = sum(us for name, us in inside.items() if "select" in name)
    ids = np.asarray(jax.jit(call)(queries[0], *rest))
    result = {
        "shape": str(shape),
        "bytes": shape.bytes,
        "score_us": score,
        "selection_us": select,
        "call_us": time.span,
        "gb_per_s": shape.bytes / time.span / 1e3,
        "share_of_ceiling": shape.bytes / time.span / 1e3 / ceiling,
    }
    if peers is not None:
        result["peers_us"] = {}
        for variant in VARIANTS:
            result["peers_us"][variant], theirs = peers.decode(variant, queries, rest, shape.statics)
            result.setdefault("ids_equal", {})[variant] = float(np.mean(theirs == ids))
        result["best_peer_over_ours"] = min(result["peers_us"].values()) / time.span
    # One call: XLA would gather once for several, and its gathered keys and float32 products exist whole.
    way = measure(lambda q, *a: gather_all(q, *a, *shape.statics), (queries[:1], *rest), 1)
    result["xla_way_us"] = way.span
    result["xla_way_over_ours"] = way.span / time.span
    own = measure(
        lambda q, *a: m3_pallas.minimax_m3_index_decode(q, *a, *shape.statics, implementation="xla"),
        (queries[:1], *rest),
        1,
    )
    result["portable_us"] = own.span
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=pathlib.Path, help="folder with vLLM's vllm/models/minimax_m3 (needs PyTorch)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows here")
    parser.add_argument("--only", default="", help="shapes whose name contains this, such as 'H 4'")
    options = parser.parse_args()
    device = jax.devices()[0]
    ceiling = read_ceiling()
    peers = Peers(options.peers) if options.peers else None
    print(f"{device.device_kind}, JAX {jax.__version__}, K {TOPK}, read ceiling {ceiling:.0f} GB/s")
    print(f"{'shape':<20}{'score':>8}{'select':>8}{'call us':>9}{'share':>7}  best peer    ratio  XLA way   ratio")
    rows = []
    for shape in DECODE:
        if options.only not in str(shape):
            continue
        result = row(shape, ceiling, peers)
        rows.append(result)
        theirs = result.get("peers_us", {})
        best = min(theirs, key=theirs.get) if theirs else ""
        print(
            f"{result['shape']:<20}{result['score_us']:8.2f}{result['selection_us']:8.2f}{result['call_us']:9.2f}"
            f"{result['share_of_ceiling']:7.1%}  {theirs.get(best, math.nan):7.1f} {best[:10]:<10}"
            f"{result.get('best_peer_over_ours', math.nan):5.2f} {result['xla_way_us']:8.0f}"
            f"{result['xla_way_over_ours']:8.2f}",
            flush=True,
        )
    summary = {"xla_way_over_ours": geometric_mean([r["xla_way_over_ours"] for r in rows])}
    if peers is not None:
        summary["best_peer_over_ours"] = geometric_mean([r["best_peer_over_ours"] for r in rows])
    print("geometric means:", ", ".join(f"{name} {value:.3f}" for name, value in summary.items()))
    if options.json:
        record: dict[str, Any] = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "m3_pallas": m3_pallas.__version__,
            "read_ceiling_gb_per_s": ceiling,
            "geometric_means": summary,
            "rows": rows,
        }
        if peers is not None:
            record["peers"] = peers.versions()
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
