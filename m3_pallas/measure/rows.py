"""One row of a benchmark: this library, the XLA way and vLLM's kernels on the same arrays. Ids are compared too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

import m3_pallas
from m3_pallas.implementations import Implementation
from m3_pallas.measure.profiling import DeviceTime, device_time
from m3_pallas.measure.shapes import TOPK, DecodeShape, PrefillShape, decode_arrays, prefill_arrays
from m3_pallas.measure.vllm import VARIANTS, Peers
from m3_pallas.measure.xla_way import gather_all

PREFILL_VARIANTS = ("amd", "common")  # gfx950 changes nothing in prefill


def chain_time(call, firsts: tuple, *rest: Any) -> DeviceTime:
    """Time of one call in a jitted chain of one call for each of `firsts`."""
    function = jax.jit(lambda firsts, *rest: [call(first, *rest) for first in firsts])
    return device_time(function, firsts, *rest, calls=len(firsts))


def part(time: DeviceTime, word: str) -> float | None:
    """Microseconds in our kernels whose name has `word`, where the profiler tells kernels apart."""
    inside = [us for name, us in time.kernels.items() if name.startswith("m3_") and word in name]
    return sum(inside) if inside else None


def same_ids(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Share of equal ids, each row as a set: vLLM leaves the order of ties open in prefill."""
    return float(np.mean(np.sort(theirs, -1) == np.sort(ours, -1)))


def gathered_bytes(shape: DecodeShape) -> int:
    """What the XLA way keeps: the cache, the gathered keys, and all products in float32 twice."""
    return 2 * shape.bytes + 8 * shape.requests * shape.query_len * shape.heads * shape.context


def decode_row(
    shape: DecodeShape, implementation: Implementation | None, ceiling: float, peers: Peers | None, memory: int | None
) -> dict[str, Any]:
    """Microseconds, GB/s of index keys read, share of the read ceiling, and ratios of others to this library."""
    on_cpu = jax.default_backend() == "cpu"
    calls = 2 if on_cpu else 40 if shape.bytes < 2**29 else 16
    queries, *rest = decode_arrays(shape, calls)
    decode: Any = functools.partial(m3_pallas.minimax_m3_index_decode, implementation=implementation)
    call = lambda q, *a: decode(q, *a, *shape.statics)  # noqa: E731
    time = chain_time(call, tuple(queries), *rest)
    ids = np.asarray(jax.jit(call)(queries[0], *rest))
    row = {
        "shape": str(shape),
        "bytes": shape.bytes,
        "method": time.method,
        "score_us": part(time, "score"),
        "selection_us": part(time, "select"),
        "call_us": time.span,
        "gb_per_s": shape.bytes / time.span / 1e3,
        "share_of_ceiling": shape.bytes / time.span / 1e3 / ceiling,
    }
    if peers is not None:
        row["peers_us"], row["ids_equal"] = {}, {}
        for variant in VARIANTS:
            row["peers_us"][variant], theirs = peers.decode(variant, queries, tuple(rest), shape.statics)
            row["ids_equal"][variant] = same_ids(theirs, ids)
        row["best_peer_over_ours"] = min(row["peers_us"].values()) / time.span
    if memory is None or gathered_bytes(shape) <= memory:
        # One call: XLA would gather once for several, and its gathered keys and float32 products exist whole.
        way = chain_time(lambda q, *a: gather_all(q, *a, *shape.statics), (queries[0],), *rest)
        row["xla_way_us"] = way.span
        row["xla_way_over_ours"] = way.span / time.span
    return row


def prefill_row(
    shape: PrefillShape,
    implementation: Implementation | None,
    ceiling: float,
    peers: Peers | None,
    *,
    compare_portable: bool,
) -> dict[str, Any]:  # fmt: skip
    """Microseconds of score, top-k and combined call, TFLOP/s, share of the matrix ceiling, ratios of others."""
    on_cpu = jax.default_backend() == "cpu"
    queries, *rest = prefill_arrays(shape, 1 if on_cpu else 4)
    starts, prefix = rest[2], rest[4]
    each = tuple(queries)
    score_call: Any = m3_pallas.minimax_m3_index_score
    combined_call: Any = m3_pallas.minimax_m3_index_prefill

    def score(q, *a, implementation: Implementation | None = implementation):
        return score_call(q, *a, *shape.statics, implementation=implementation)

    def select(s, starts, prefix, implementation: Implementation | None = implementation):
        return m3_pallas.minimax_m3_index_topk(
            s, starts, prefix, shape.tokens, TOPK, 0, 1, implementation=implementation
        )  # fmt: skip

    def combined(q, *a):
        statics = (shape.tokens, shape.context, TOPK, 0, 1, shape.heads)
        return combined_call(q, *a, *statics, implementation=implementation)

    score_time = chain_time(score, each, *rest)
    scores = tuple(jax.jit(lambda qs, *a: [score(q, *a) for q in qs])(each, *rest))
    select_time = chain_time(select, scores, starts, prefix)
    ids = np.asarray(select(scores[-1], starts, prefix))
    tflops = shape.flops / score_time.span / 1e6
    row = {
        "shape": str(shape),
        "flops": shape.flops,
        "method": score_time.method,
        "score_us": score_time.span,
        "selection_us": select_time.span,
        "combined_us": chain_time(combined, each, *rest).span,
        "combined_equal": bool((np.asarray(combined(queries[-1], *rest)) == ids).all()),
        "tflop_per_s": tflops,
        "share_of_ceiling": tflops / ceiling,
    }
    if peers is not None:
        row["peers_us"], row["ids_equal"] = {}, {}
        for variant in PREFILL_VARIANTS:
            *times, theirs = peers.prefill(variant, queries, tuple(rest), shape.statics, (TOPK, 0, 1))
            row["peers_us"][variant] = dict(zip(("score", "selection"), times, strict=True))
            row["ids_equal"][variant] = same_ids(theirs, ids)
        for name in ("score", "selection"):
            best = min(times[name] for times in row["peers_us"].values())
            row[f"best_peer_over_ours_{name}"] = best / row[f"{name}_us"]
    if compare_portable:
        portable = chain_time(functools.partial(score, implementation="xla"), each[:1], *rest).span
        portable += chain_time(functools.partial(select, implementation="xla"), scores[:1], starts, prefix).span
        row["portable_us"] = portable
        row["portable_over_ours"] = portable / (row["score_us"] + row["selection_us"])
    return row
