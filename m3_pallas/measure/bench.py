"""`python -m m3_pallas bench`: decode and prefill at MiniMax-M3's shapes on this device.

Device time from the JAX profiler where the platform has it, else by the host's clock over long chains, and labelled so;
shares of a read and a matrix ceiling measured in the same run; the usual XLA way, and with --vllm vLLM's own kernels,
on the same arrays. Interrupted, it keeps the finished rows.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from m3_pallas import implementations
from m3_pallas.measure import environment, profiling, progress, report, rows, shapes, vllm
from m3_pallas.measure.output import CANNOT_START, DIFFERENT, INTERRUPTED, check_file, error_line, write_json
from m3_pallas.measure.shapes import DecodeShape, K, M, PrefillShape

PICTURES = (".png", ".pdf", ".svg")
HEADS = (4, 2, 1)  # index heads a device at tensor parallelism 1, 2 and 4
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
    parser.add_argument(
        "--query-len", type=int, choices=range(1, 9), default=1, metavar="1..8", help="query tokens a request in decode"
    )
    parser.add_argument("--tokens", type=integers, metavar="LIST", help="query tokens of a prefill chunk")
    parser.add_argument(
        "--implementation", choices=implementations.NAMES, help="instead of the one that is chosen here"
    )
    parser.add_argument(
        "--vllm",
        nargs="?",
        const="",
        metavar="PATH",
        help="also vLLM's kernels, of a checkout (the folder above vllm/) or the installed vllm",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows here, too")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw shares of the ceilings")


def wanted(options: argparse.Namespace) -> tuple[list[DecodeShape], list[PrefillShape]]:
    """All shapes that were asked for, whether or not they fit.

    Raises:
      ValueError: if the options ask for none.
    """
    shape_options = ("requests", "heads", "contexts", "tokens")
    if options.table:
        given = [name for name in shape_options if getattr(options, name)] + ["query-len"] * (options.query_len != 1)
        if given:
            raise ValueError(f"--table has its own shapes; leave out --{', --'.join(given)}")
        decode, prefill = list(shapes.DECODE), list(shapes.PREFILL)
    else:
        on_cpu = jax.default_backend() == "cpu"
        heads = options.heads or HEADS
        contexts = options.contexts or ((8 * K, 32 * K) if on_cpu else (8 * K, 128 * K, M))
        requests = options.requests or ((1, 4) if on_cpu else (1, 16, 64, 256))
        default = (512,) if on_cpu else (2 * K, 8 * K)
        chunks = [
            (context, tokens)
            for context in contexts
            for tokens in options.tokens or sorted({min(tokens, context) for tokens in default})
            if tokens <= context
        ]
        decode = [DecodeShape(r, h, options.query_len, c) for h in heads for c in contexts for r in requests]
        prefill = [PrefillShape(h, tokens, context - tokens) for h in heads for context, tokens in chunks]
        if options.call != "decode" and not prefill:
            raise ValueError(f"no context of {contexts} holds a chunk of --tokens {options.tokens}")
    return decode if options.call != "prefill" else [], prefill if options.call != "decode" else []


def named(options: argparse.Namespace, **attributes: str) -> Callable[[Any], tuple[int, ...]]:
    """Of a shape its numbers that were asked for: `attributes` by option."""
    return lambda shape: tuple(
        getattr(shape, attribute) for option, attribute in attributes.items() if getattr(options, option)
    )


def fitting(wanted: Sequence[Any], memory: int | None, numbers: Callable[[Any], tuple[int, ...]]) -> list[Any]:
    """The shapes that fit in memory; `numbers` are those of a shape that were asked for.

    Raises:
      MemoryError: if none fits, or none with numbers that were asked for.
    """
    fits = [shape for shape in wanted if memory is None or shape.needed <= memory]
    served = {numbers(shape) for shape in fits}
    refused = [shape for shape in wanted if numbers(shape) not in served]
    if refused:
        shape = min(refused, key=lambda shape: shape.needed)
        assert memory is not None
        raise MemoryError(
            f"{shape} needs {shape.needed / 1e9:.1f} GB and {memory / 1e9:.1f} GB may be used: "
            "ask for less with --requests, --contexts or --tokens"
        )
    if len(fits) < len(wanted):
        print("left out, too large for this memory: " + ", ".join(str(shape) for shape in wanted if shape not in fits))
    return fits


def run(options: argparse.Namespace) -> int:
    """Print a row a shape as it is measured.

    Returns:
      0; 1 if a row failed or its answers differ; 2 if it cannot start; 130 if it was interrupted.
    """
    memory = environment.memory_bytes()
    try:
        check_outputs(options)
        check_implementation(options.implementation)
        decode, prefill = wanted(options)
        decode = fitting(decode, memory, named(options, requests="requests", contexts="context"))
        prefill = fitting(prefill, memory, named(options, tokens="tokens", contexts="context"))
        peers, passed_over = (None, []) if options.vllm is None else vllm.peers(options.vllm)
    except (ImportError, MemoryError, OSError, ValueError) as error:
        print(f"m3_pallas bench: {error}", file=sys.stderr)
        return CANNOT_START
    record: Row = environment.describe() | {"topk": shapes.TOPK}
    environment.print_description(record)
    if options.implementation is not None:
        print(f"asked for: {options.implementation}")
    if peers is not None:
        record["peers"] = {"through": peers.name, **peers.versions(), "passed_over": passed_over}
        print("vLLM's kernels through " + ", ".join(f"{k} {v}" for k, v in peers.versions().items()))
        for reason in passed_over:
            print(f"not through {reason}")
    record |= {"asked_for": options.implementation, "decode": [], "prefill": [], "interrupted": False}
    save = functools.partial(write_record, options.json, record)
    try:
        measure(record, decode, prefill, options.implementation, peers, memory, save)
    except KeyboardInterrupt:
        record["interrupted"] = True
        done = len(record["decode"] + record["prefill"])
        print(f"\ninterrupted: {done} rows are finished" + ("" if done else ", no record is written"))
    finally:
        save()
    for name, value in record["geometric_means"].items():
        print(f"geometric mean, {name}: {value:.2f}")
    if options.plot is not None and any(map(report.finished, (record["decode"], record["prefill"]))):
        report.plot(record, options.plot)
    if record["interrupted"]:
        return INTERRUPTED
    rows_done = record["decode"] + record["prefill"]
    return DIFFERENT if any("error" in row or not row.get("combined_equal", True) for row in rows_done) else 0


def check_outputs(options: argparse.Namespace) -> None:
    """Before anything is measured: can the record be written and the plot drawn?

    Raises:
      OSError, ValueError: if a file cannot be written, or is no picture.
      ImportError: if matplotlib is missing.
    """
    check_file(options.json)
    check_file(options.plot)
    if options.plot is None:
        return
    if options.plot == options.json:
        raise ValueError(f"--plot and --json are both {options.plot}")
    if options.plot.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot must end in one of {', '.join(PICTURES)}, got {options.plot}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib (extra `bench`)")


def check_implementation(name: str | None) -> None:
    """Raise ValueError if the implementation that was asked for runs on other platforms only."""
    platforms = implementations.PLATFORMS[name] if name else ()
    if platforms and environment.lowering_platform() not in platforms:
        raise ValueError(
            f"--implementation {name} runs on {', '.join(platforms)}, not {environment.lowering_platform()}"
        )


def write_record(file: pathlib.Path | None, record: Row) -> None:
    """Geometric means of what is finished, and all of it to `file` if there is a row: no earlier record is emptied."""
    record["geometric_means"] = report.geometric_means(record)
    if file is not None and record["decode"] + record["prefill"]:
        write_json(file, record)


def measure(record: Row, decode, prefill, implementation, peers, memory, save: Callable[[], None]) -> None:
    """Add the ceilings and the rows to `record`, one after the other."""
    on_cpu = jax.default_backend() == "cpu"
    if decode:
        num_bytes = min(1 << 28 if on_cpu else 2 << 30, (memory or 8 << 30) // 4)
        ceiling = ceiling_of(record, "read", "GB/s", lambda: profiling.read_ceiling(num_bytes))
        print(report.DECODE_HEAD)
        measured = functools.partial(
            rows.decode_row, implementation=implementation, ceiling=ceiling, peers=peers, memory=memory
        )
        each(record["decode"], decode, "decode", report.decode_line, measured, save)
    if prefill:
        ceiling = ceiling_of(record, "matrix", "TFLOP/s", lambda: profiling.matrix_ceiling(1024 if on_cpu else 8192))
        print(report.PREFILL_HEAD)
        measured = functools.partial(
            rows.prefill_row, implementation=implementation, ceiling=ceiling, peers=peers, memory=memory
        )
        each(record["prefill"], prefill, "prefill", report.prefill_line, measured, save)


def ceiling_of(
    record: Row, name: str, unit: str, measured: Callable[[], profiling.Ceiling]
) -> profiling.Ceiling | None:
    """The ceiling, also in `record` and on the screen; if it fails, the rows are measured without."""
    try:
        ceiling = measured()
    except Exception as error:
        record[f"{name}_ceiling_error"] = error_line(error)
        print(f"\nno {name} ceiling: {error_line(error)}")
        return None
    key = f"{name}_ceiling_{unit.lower().replace('/', '_per_')}"
    record |= {key: ceiling.value, f"{name}_ceiling_method": ceiling.method}
    print(f"\n{name} ceiling {ceiling.value:.{0 if ceiling.value > 100 else 2}f} {unit} ({ceiling.method})")
    return ceiling


def each(
    done: list[Row], asked: Sequence[Any], label: str, line: Callable[[Row], str], row: Callable[[Any], Row],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """A row for each shape, saved as it comes; a shape that fails leaves its error and the other rows."""
    for shape in progress.bar(asked, label):
        try:
            measured = row(shape)
            text = line(measured)
        except Exception as error:
            measured = {"shape": str(shape), "error": error_line(error)}
            text = f"{measured['shape']:<24}{measured['error']}"
        done.append(measured)
        progress.say(text)
        save()
