"""One row of a benchmark: this library, the XLA way and vLLM's kernels on the same arrays. Ids are compared too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import m3_pallas
from m3_pallas.implementations import Implementation
from m3_pallas.measure import environment, xla_way
from m3_pallas.measure.output import error_line
from m3_pallas.measure.profiling import HOST_CLOCK, LAUNCHED, PROFILER, Ceiling, DeviceTime, device_time
from m3_pallas.measure.shapes import PREFILL_CALLS, TOPK, DecodeShape, PrefillShape, decode_arrays, prefill_arrays
from m3_pallas.measure.vllm import VARIANTS, Peers

SAME_IDS = 0.99  # share of equal ids from which a peer did the same work: sums in another order swap close scores
PREFILL_VARIANTS = ("amd", "common")  # gfx950 changes nothing in prefill


def chain_time(call, firsts: tuple, *rest: Any) -> DeviceTime:
    """Time of one call in a jitted chain of one call for each of `firsts`."""
    function = jax.jit(lambda firsts, *rest: [call(first, *rest) for first in firsts])
    return device_time(function, firsts, *rest, calls=len(firsts))


def part(time: DeviceTime, word: str) -> float | None:
    """Microseconds in our kernels whose name has `word`, where the profiler tells kernels apart."""
    inside = [us for name, us in time.kernels.items() if "m3_" in name and word in name]
    return sum(inside) if inside else None


def share(value: float, ceiling: Ceiling | None) -> float | None:
    return None if ceiling is None else value / ceiling.value


def same_ids(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Share of our ids that are theirs too, row by row, in any order: vLLM leaves that of ties open in prefill."""
    common = (ours[..., :, None] == theirs[..., None, :]).any(-1) & (ours >= 0)
    absent = np.minimum((ours < 0).sum(-1), (theirs < 0).sum(-1))  # -1 may come several times
    return float((common.sum() + absent.sum()) / ours.size)


def chosen(implementation: Implementation | None, call, *arrays: Any) -> str:
    """The implementation that runs, by name."""
    return implementation or environment.choice(call, *arrays).implementation


def peer_times(row: dict[str, Any], variants: tuple[str, ...], call, ids: np.ndarray) -> dict[str, list[DeviceTime]]:
    """Times of `call(variant)`, which returns them and then ids; equal ids, clocks and errors go to `row`.

    Other answers than ours are an error, too: their time is none of the same work.
    """
    times = {}
    row |= {"ids_equal": {}, "peer_errors": {}, "peer_methods": {}}
    for variant in variants:
        try:
            *measured, theirs = call(variant)
        except Exception as error:  # a variant that does not run here leaves the others
            row["peer_errors"][variant] = error_line(error)
            continue
        equal = row["ids_equal"][variant] = same_ids(theirs, ids)
        if equal >= SAME_IDS:
            times[variant] = measured
            methods = [time.method for time in measured if time.method != PROFILER]
            row["peer_methods"][variant] = methods[0] if methods else PROFILER
        else:
            row["peer_errors"][variant] = f"{equal:.1%} of the ids are equal"
    return times


def add_ratio(row: dict[str, Any], name: str, theirs: list[DeviceTime], ours: DeviceTime) -> None:
    """The best of `theirs` over `ours`, where their clocks can be compared."""
    ratios = [ratio for ratio in (time.over(ours) for time in theirs) if ratio is not None]
    if ratios:
        row[name] = min(ratios)


def add_xla_way(row: dict[str, Any], call, query, rest: Sequence[Any], ours: DeviceTime) -> None:
    """Its time and the ratio, or the error: it takes most memory and fails first.

    One call: XLA would gather once for several, and its gathered keys and float32 products exist whole.
    """
    try:
        way = chain_time(call, (query,), *rest)
    except Exception as error:
        row["xla_way_error"] = error_line(error)
        return
    row["xla_way_us"] = way.span
    add_ratio(row, "xla_way_over_ours", [way], ours)


def decode_row(
    shape: DecodeShape,
    implementation: Implementation | None,
    ceiling: Ceiling | None,
    peers: Peers | None,
    memory: int | None,
) -> dict[str, Any]:
    """Microseconds, GB/s of index keys read, share of the read ceiling, and ratios of others to this library."""
    on_cpu = jax.default_backend() == "cpu"
    calls = 2 if on_cpu else 40 if shape.bytes < 2**29 else 16
    queries, *rest = decode_arrays(shape, calls)

    def call(q, *a, implementation: Implementation | None = implementation) -> Any:
        decode: Any = m3_pallas.minimax_m3_index_decode
        return decode(q, *a, *shape.statics, implementation=implementation)

    time = chain_time(call, tuple(queries), *rest)
    ids = np.asarray(jax.jit(call)(queries[0], *rest))
    row = {
        "shape": str(shape),
        "requests": shape.requests,
        "heads": shape.heads,
        "query_len": shape.query_len,
        "context": shape.context,
        "bytes": shape.bytes,
        "implementation": chosen(implementation, call, queries[0], *rest),
        "method": time.method,
        "score_us": part(time, "score"),
        "selection_us": part(time, "select"),
        "call_us": time.span,
        "gb_per_s": shape.bytes / time.span / 1e3,
        "share_of_ceiling": share(shape.bytes / time.span / 1e3, ceiling),
    }
    if peers is not None:
        times = peer_times(
            row, VARIANTS, lambda v: peers.decode(v, queries, tuple(rest), shape.statics), ids
        )  # fmt: skip
        row["peers_us"] = {v: whole.span for v, (whole,) in times.items()}
        add_ratio(row, "best_peer_over_ours", [whole for (whole,) in times.values()], time)
    if memory is None or shape.gathered <= memory:
        add_xla_way(row, lambda q, *a: xla_way.decode(q, *a, *shape.statics), queries[0], rest, time)
    return row


def prefill_row(
    shape: PrefillShape,
    implementation: Implementation | None,
    ceiling: Ceiling | None,
    peers: Peers | None,
    memory: int | None,
) -> dict[str, Any]:
    """Microseconds of score, top-k and combined call, TFLOP/s, share of the matrix ceiling, ratios of others."""
    on_cpu = jax.default_backend() == "cpu"
    queries, *rest = prefill_arrays(shape, 1 if on_cpu else PREFILL_CALLS)
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

    ours = {"score": chain_time(score, each, *rest)}
    scores = tuple(jax.jit(lambda qs, *a: [score(q, *a) for q in qs])(each, *rest))
    ours |= {"selection": chain_time(select, scores, starts, prefix), "combined": chain_time(combined, each, *rest)}
    ids = np.asarray(select(scores[-1], starts, prefix))
    tflops = shape.flops / ours["score"].span / 1e6
    row = {
        "shape": str(shape),
        "heads": shape.heads,
        "tokens": shape.tokens,
        "prefix": shape.prefix,
        "flops": shape.flops,
        "implementation": {
            "score": chosen(implementation, score, each[-1], *rest),
            "selection": chosen(implementation, select, scores[-1], starts, prefix),
        },
        "method": max((time.method for time in ours.values()), key=[PROFILER, LAUNCHED, HOST_CLOCK].index),
        **{f"{name}_us": time.span for name, time in ours.items()},
        "combined_equal": bool((np.asarray(combined(queries[-1], *rest)) == ids).all()),
        "tflop_per_s": tflops,
        "share_of_ceiling": share(tflops, ceiling),
    }
    del scores  # vLLM's take as much again
    if peers is not None:
        topk = (TOPK, 0, 1)
        times = peer_times(
            row, PREFILL_VARIANTS, lambda v: peers.prefill(v, queries, tuple(rest), shape.statics, topk), ids
        )  # fmt: skip
        row["peers_us"] = {v: {"score": s.span, "selection": t.span} for v, (s, t) in times.items()}
        for i, name in enumerate(("score", "selection")):
            add_ratio(row, f"best_peer_over_ours_{name}", [both[i] for both in times.values()], ours[name])
    if memory is None or shape.gathered <= memory:
        way = functools.partial(xla_way.prefill, heads=shape.heads, topk=TOPK)
        add_xla_way(row, way, each[0], rest, ours["combined"])
    return row
