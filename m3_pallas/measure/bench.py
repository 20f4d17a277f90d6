"""`python -m m3_pallas bench`: decode and prefill at MiniMax-M3's shapes on this device.

Device time from the JAX profiler where the platform has it, else by the host's clock over long chains, and labelled so;
shares of a read and a matrix ceiling measured in the same run; the usual XLA way, and with --vllm vLLM's own kernels,
on the same arrays. Interrupted, it keeps the finished rows.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from m3_pallas import implementations
from m3_pallas.measure import environment, profiling, progress, report, rows, shapes, vllm
from m3_pallas.measure.check import write_json
from m3_pallas.measure.shapes import DecodeShape, K, M, PrefillShape

HEADS = (4, 2, 1)  # index heads a device at tensor parallelism 1, 2 and 4
WORKING_SETS = 3  # a shape is measured in at most this many times its bytes
INTERRUPTED = 130
Row = dict[str, Any]


def integers(text: str) -> tuple[int, ...]:
    """ "1,8K,1M" as integers."""
    units = {"K": K, "M": M}
    try:
        numbers = tuple(
            int(part[:-1]) * units[part[-1]] if part[-1:] in units else int(part) for part in text.upper().split(",")
        )
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive integers such as 1,8K,1M")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--call", choices=("decode", "prefill", "all"), default="all", help="what to time")
    parser.add_argument("--table", action="store_true", help="the shapes of docs/performance.md, and no others")
    parser.add_argument("--requests", type=integers, metavar="LIST", help="batch sizes of decode, such as 1,64")
    parser.add_argument("--heads", type=integers, metavar="LIST", help="index heads, such as 4,1")
    parser.add_argument("--contexts", type=integers, metavar="LIST", help="tokens a request, such as 8K,128K,1M")
    parser.add_argument("--query-len", type=int, choices=range(1, 9), default=1, metavar="1..8", help="decode tokens")
    parser.add_argument("--tokens", type=integers, metavar="LIST", help="query tokens of a prefill chunk")
    parser.add_argument("--implementation", choices=implementations.NAMES, help="instead of None's choice")
    parser.add_argument(
        "--vllm", nargs="?", const="", metavar="PATH", help="also vLLM's kernels, of a checkout or the installed vllm"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows here, too")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw shares of the ceilings")


def wanted(options: argparse.Namespace) -> tuple[list[DecodeShape], list[PrefillShape]]:
    """All shapes that were asked for, whether or not they fit."""
    if options.table:
        decode, prefill = shapes.DECODE, shapes.PREFILL
    else:
        on_cpu = jax.default_backend() == "cpu"
        heads = options.heads or HEADS
        contexts = options.contexts or ((8 * K, 32 * K) if on_cpu else (8 * K, 128 * K, M))
        requests = options.requests or ((1, 4) if on_cpu else (1, 16, 64, 256))
        tokens = options.tokens or ((512,) if on_cpu else (2 * K, 8 * K))
        decode = [DecodeShape(r, h, options.query_len, c) for h in heads for c in contexts for r in requests]
        prefill = [PrefillShape(h, t, c - t) for h in heads for c in contexts for t in tokens if t <= c]
    return list(decode) if options.call != "prefill" else [], list(prefill) if options.call != "decode" else []


def fitting(asked: Sequence[Any], memory: int | None, *, explicit: bool) -> list[Any]:
    """The shapes that fit in memory.

    Raises:
      MemoryError: if none does, or if one that was asked for by its numbers does not.
    """
    too_large = [shape for shape in asked if memory is not None and WORKING_SETS * shape.bytes > memory]
    if too_large and (explicit or len(too_large) == len(asked)):
        shape = too_large[0]
        assert memory is not None
        raise MemoryError(
            f"{shape} needs {WORKING_SETS * shape.bytes / 1e9:.1f} GB and {memory / 1e9:.1f} GB are free: "
            "ask for less with --requests, --contexts or --tokens"
        )
    if too_large:
        print("left out, too large for this memory: " + ", ".join(map(str, too_large)))
    return [shape for shape in asked if shape not in too_large]


def run(options: argparse.Namespace) -> int:
    """Print a row a shape as it is measured; 0, 2 if it cannot start, 130 if it was interrupted."""
    memory = environment.memory_bytes()
    explicit = bool(options.requests or options.contexts or options.tokens)
    decode, prefill = wanted(options)
    try:
        decode, prefill = (fitting(asked, memory, explicit=explicit) for asked in (decode, prefill))
        peers = None if options.vllm is None else vllm.peers(options.vllm)
    except (MemoryError, FileNotFoundError, ImportError) as error:
        print(f"m3_pallas bench: {error}", file=sys.stderr)
        return 2
    record = environment.describe() | {"date": datetime.date.today().isoformat(), "topk": shapes.TOPK}
    environment.print_description(record)
    if peers is not None:
        record["peers"] = {"through": peers.name, **peers.versions()}
        print("vLLM's kernels through " + ", ".join(f"{k} {v}" for k, v in record["peers"].items() if k != "through"))
    record |= {"decode": [], "prefill": [], "interrupted": False}
    try:
        measure(record, decode, prefill, options.implementation, peers, memory)
    except KeyboardInterrupt:
        record["interrupted"] = True
        print("\ninterrupted: the rows above are finished")
    record["geometric_means"] = report.geometric_means(record)
    for name, value in record["geometric_means"].items():
        print(f"geometric mean, {name}: {value:.2f}")
    if options.json is not None:
        write_json(options.json, record)
    if options.plot is not None and record["decode"] + record["prefill"]:
        report.plot(record, options.plot)
    return INTERRUPTED if record["interrupted"] else 0


def measure(record: Row, decode, prefill, implementation, peers, memory) -> None:
    """Add the ceilings and the rows to `record`, one after the other."""
    on_cpu = jax.default_backend() == "cpu"
    if decode:
        record["read_ceiling_gb_per_s"] = ceiling = profiling.read_ceiling(1 << 28 if on_cpu else 2 << 30)
        print(f"\nread ceiling {ceiling:.0f} GB/s\n{report.DECODE_HEAD}")
        each(record["decode"], decode, "decode", report.decode_line, lambda shape: rows.decode_row(
            shape, implementation, ceiling, peers, memory
        ))  # fmt: skip
    if prefill:
        chosen = implementation or record["implementations"]["prefill"]["implementation"]
        record["matrix_ceiling_tflop_per_s"] = top = profiling.matrix_ceiling(1024 if on_cpu else 8192)
        print(f"\nmatrix ceiling {top:.2f} TFLOP/s\n{report.PREFILL_HEAD}")
        each(record["prefill"], prefill, "prefill", report.prefill_line, lambda shape: rows.prefill_row(
            shape, implementation, top, peers, compare_portable=chosen != "xla"
        ))  # fmt: skip


def each(
    done: list[Row], asked: Sequence[Any], label: str, line: Callable[[Row], str], row: Callable[[Any], Row]
) -> None:
    for shape in progress.bar(asked, label):
        done.append(row(shape))
        print(line(done[-1]), flush=True)
