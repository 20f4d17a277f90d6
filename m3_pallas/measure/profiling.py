"""Time of jitted JAX calls, and the ceilings it is compared with.

On a GPU or TPU from the profiler's trace, since host clocks are useless below 50 us; elsewhere by the host's clock over
a long chain of calls.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Event: TypeAlias = tuple[str, float, float]  # name, start and end in ns
PROFILER, GRAPH, HOST_CLOCK = "profiler", "graph replay", "host clock"
# The lines of a trace that hold what ran on the device, by what the plane's name contains.
DEVICE_LINES = {"/device:GPU": "Stream", "/device:TPU": "XLA Ops"}
HOST_CHAIN_SECONDS = 0.3
TRACES = 3  # attempts at a trace whose replays are alike


class Ceiling(NamedTuple):
    """What the device reaches at best: GB/s or TFLOP/s, and by which clock."""

    value: float
    method: str


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Median times of one replay, in microseconds a call.

    Attributes:
      span: from the first kernel's start to the last one's end, gaps included.
      kernels: time inside each kernel, by name; empty without the profiler.
      method: `PROFILER` or `HOST_CLOCK`; of PyTorch's kernels `GRAPH`, device time too.
    """

    span: float
    kernels: dict[str, float]
    method: str = PROFILER

    def over(self, other: DeviceTime) -> float | None:
        """This span over the other's; None where one is device time and the other is not."""
        return self.span / other.span if (self.method == HOST_CLOCK) == (other.method == HOST_CLOCK) else None


def device_time(function: Callable[..., Any], *arguments: Any, calls: int, replays: int = 7) -> DeviceTime:
    """Time a jitted function that makes `calls` calls of the thing measured, on distinct arguments.

    Distinct, because XLA merges equal calls. Enough of them that the function runs as one command buffer.
    """
    for _ in range(3):
        jax.block_until_ready(function(*arguments))
    if jax.default_backend() == "cpu":
        return _host_time(function, arguments, calls)
    for _ in range(TRACES):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(replays):
                    jax.block_until_ready(function(*arguments))
            chunks = _replays_of(_kernel_events(pathlib.Path(folder)), replays)
        if chunks is not None:
            break
    else:  # a platform whose trace is laid out otherwise, or that did something else meanwhile
        return _host_time(function, arguments, calls)
    spans = [(max(end for _, _, end in chunk) - chunk[0][1]) / calls / 1e3 for chunk in chunks]
    inside = {
        name: statistics.median(sum(e - s for n, s, e in chunk if n == name) for chunk in chunks) / calls / 1e3
        for name in sorted({name for name, _, _ in chunks[0]})
    }
    return DeviceTime(statistics.median(spans), inside)


def _replays_of(events: list[Event], replays: int) -> list[list[Event]] | None:
    """The events of each replay but the first, which warms the profiler up; None unless they ran the same kernels."""
    size = len(events) // replays
    chunks = [events[i * size : (i + 1) * size] for i in range(1, replays)]
    alike = {tuple(sorted(name for name, _, _ in chunk)) for chunk in chunks}
    return chunks if size and size * replays == len(events) and len(alike) == 1 else None


def _host_time(function: Callable[..., Any], arguments: tuple, calls: int) -> DeviceTime:
    """The best of five chains, each of several tenths of a second, dispatched without waiting in between."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    length = max(1, round(HOST_CHAIN_SECONDS / max(time.perf_counter() - start, 1e-7)))
    spans = []
    for _ in range(5):
        start = time.perf_counter()
        last = function(*arguments)
        for _ in range(length - 1):
            last = function(*arguments)  # only the last result is kept
        jax.block_until_ready(last)
        spans.append((time.perf_counter() - start) / length / calls * 1e6)
    return DeviceTime(min(spans), {}, HOST_CLOCK)


def _kernel_events(folder: pathlib.Path) -> list[Event]:
    """Everything that ran on the first device, by start."""
    files = list(folder.rglob("*.xplane.pb"))
    return device_events(jax.profiler.ProfileData.from_file(str(files[0])).planes) if files else []


def device_events(planes: Iterable[Any]) -> list[Event]:
    """What the first device's plane of a trace holds, by start."""
    for plane in sorted(planes, key=lambda plane: plane.name):
        for device, line_name in DEVICE_LINES.items():
            if device in plane.name:
                lines = [line for line in plane.lines if line_name in line.name]
                events = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for line in lines for e in line.events]
                if events:
                    return sorted(events, key=lambda event: event[1])
    return []


def read_ceiling(num_bytes: int = 2 << 30) -> Ceiling:
    """GB/s of XLA's own reductions over `num_bytes`: the better of a bfloat16 maximum and a float32 sum."""
    best = Ceiling(0.0, HOST_CLOCK)
    for dtype, reduce in (
        (jnp.bfloat16, lambda x: jnp.max(jnp.abs(x), axis=1)),
        (jnp.float32, partial(jnp.sum, axis=1)),
    ):
        values = jnp.ones((8, num_bytes // 8 // jnp.dtype(dtype).itemsize), dtype)
        time = device_time(jax.jit(reduce), values, calls=1)
        best = max(best, Ceiling(num_bytes / time.span / 1e3, time.method))
    return best


def matrix_ceiling(size: int = 8192) -> Ceiling:
    """TFLOP/s of one product of `size * size * size` normal bfloat16 numbers."""
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    time = device_time(jax.jit(lambda x, y: x @ y), left, right, calls=1)
    return Ceiling(2 * size**3 / time.span / 1e6, time.method)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
