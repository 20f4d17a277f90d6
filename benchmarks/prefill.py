"""Prefill on this GPU by device time: score, selection and the combined call, against vLLM's kernels.

    python -m benchmarks.prefill [--peers FOLDER] [--json FILE]

Same arrays, same process; ids are compared before times are. FLOPs are those of the products with visible blocks. The
matrix ceiling is a bf16 product of 8192 x 8192 x 8192 on normal numbers, measured the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import m3_pallas
from benchmarks.peers import Peers
from benchmarks.profiling import device_time, geometric_mean
from benchmarks.shapes import TOPK

CALLS = 4
PEERS = ("amd", "common")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One request: `tokens` query tokens after a `prefix`, H index heads."""

    heads: int
    tokens: int
    prefix: int

    @property
    def context(self) -> int:
        return self.prefix + self.tokens

    @property
    def flops(self) -> int:
        blocks = (self.prefix + np.arange(self.tokens)) // 128 + 1
        return int(2 * 128 * self.heads * blocks.sum() * 128)

    @property
    def statics(self) -> tuple[int, int, int]:
        return self.tokens, self.context, self.heads

    def __str__(self) -> str:
        return f"H {self.heads} T {self.tokens} prefix {self.prefix}"


SHAPES = (Shape(1, 8192, 0), Shape(4, 8192, 0), Shape(4, 8192, 122880), Shape(1, 8192, 122880), Shape(4, 2048, 30720))


def make_arrays(shape: Shape) -> tuple:
    """Queries `[calls, T, H, D]`, pages, table, cu_seqlens_q, seq_lens, prefix_lens."""
    blocks = shape.context // 128
    keys = jax.random.split(jax.random.key(0), 2)
    queries = jax.random.normal(keys[0], (CALLS, shape.tokens, shape.heads, 128), jnp.bfloat16)
    pages = jax.random.normal(keys[1], (blocks, 128, 128), jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(0).permutation(blocks)[None], jnp.int32)
    lengths = [jnp.array(x, jnp.int32) for x in ([0, shape.tokens], [shape.context], [shape.prefix])]
    return queries, pages, table, *lengths


def matrix_ceiling() -> float:
    """TFLOP/s of one large product."""
    size = 8192
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    time = device_time(jax.jit(lambda x, y: x @ y), left, right, calls=1)
    return 2 * size**3 / time.span / 1e6


def row(shape: Shape, ceiling: float, peers: Peers | None) -> dict[str, Any]:
    queries, *rest = make_arrays(shape)
    starts, prefix = rest[2], rest[4]
    name = "pallas_triton"

    def score(q, *a):
        return m3_pallas.minimax_m3_index_score(q, *a, *shape.statics, implementation=name)

    def select(s, starts, prefix):
        return m3_pallas.minimax_m3_index_topk(s, starts, prefix, shape.tokens, TOPK, 0, 1, implementation=name)

    def both(q, *a):
        return m3_pallas.minimax_m3_index_prefill(
            q, *a, shape.tokens, shape.context, TOPK, 0, 1, shape.heads, implementation=name
        )

    each = tuple(queries[i] for i in range(CALLS))
    score_all = jax.jit(lambda qs, *a: [score(q, *a) for q in qs])
    score_us = device_time(score_all, each, *rest, calls=CALLS).span
    scores = score_all(each, *rest)
    select_us = device_time(
        jax.jit(lambda ss, *a: [select(s, *a) for s in ss]), scores, starts, prefix, calls=CALLS
    ).span
    both_us = device_time(jax.jit(lambda qs, *a: [both(q, *a) for q in qs]), each, *rest, calls=CALLS).span
    ids = np.asarray(select(scores[-1], starts, prefix))
    tflops = shape.flops / score_us / 1e6
    result: dict[str, Any] = {
        "shape": str(shape),
        "score_us": score_us,
        "selection_us": select_us,
        "combined_us": both_us,
        "combined_equal": bool((np.asarray(both(queries[-1], *rest)) == ids).all()),
        "tflop_per_s": tflops,
        "share_of_ceiling": tflops / ceiling,
    }
    if peers is not None:
        for variant in PEERS:
            theirs = peers.prefill(variant, queries, tuple(rest), shape.statics, (TOPK, 0, 1))
            result[f"{variant}_score_us"], result[f"{variant}_selection_us"] = theirs[:2]
            same = np.mean(np.sort(theirs[2], -1) == np.sort(ids, -1))  # vLLM leaves ties open
            result[f"{variant}_ids_equal"] = float(same)
        for part in ("score", "selection"):
            best = min(result[f"{variant}_{part}_us"] for variant in PEERS)
            result[f"best_peer_over_ours_{part}"] = best / result[f"{part}_us"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=pathlib.Path, help="folder with vLLM's vllm/models/minimax_m3 (needs PyTorch)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows here")
    options = parser.parse_args()
    device = jax.devices()[0]
    ceiling = matrix_ceiling()
    peers = Peers(options.peers) if options.peers else None
    print(f"{device.device_kind}, JAX {jax.__version__}, K {TOPK}, matrix ceiling {ceiling:.0f} TFLOP/s")
    rows = []
    for shape in SHAPES:
        result = row(shape, ceiling, peers)
        rows.append(result)
        print(
            f"{result['shape']:<24} score {result['score_us']:7.1f} us {result['tflop_per_s']:4.0f} TFLOP/s "
            f"selection {result['selection_us']:6.1f} combined {result['combined_us']:7.1f} "
            f"best peer / ours: {result.get('best_peer_over_ours_score', math.nan):.2f} "
            f"{result.get('best_peer_over_ours_selection', math.nan):.2f}",
            flush=True,
        )
    means = {}
    if peers is not None:
        names = ("best_peer_over_ours_score", "best_peer_over_ours_selection")
        means = {name: geometric_mean([r[name] for r in rows]) for name in names}
        print("geometric means:", ", ".join(f"{name} {value:.2f}" for name, value in means.items()))
    if options.json:
        record: dict[str, Any] = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "m3_pallas": m3_pallas.__version__,
            "matrix_ceiling_tflop_per_s": ceiling,
            "geometric_means": means,
            "rows": rows,
        }
        if peers is not None:
            record["peers"] = peers.versions()
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
