"""Time of jitted JAX calls, and the ceilings it is compared with.

On a GPU or TPU from the profiler's trace, since host clocks are useless below 50 us; elsewhere by the host's clock over
a long chain of calls.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from m3_pallas.measure import environment

Event: TypeAlias = tuple[str, float, float]  # name, start and end in ns
PROFILER, LAUNCHED, GRAPH, HOST_CLOCK = "profiler", "profiler, launched one by one", "graph replay", "host clock"
# The lines of a trace that hold what ran on the device, by what the plane's name contains.
DEVICE_LINES = {"/device:GPU": r"Stream", "/device:TPU": r"XLA Ops$"}
HOST_CHAIN_SECONDS = 0.3
REPLAYS = 7
TRACES = 3  # attempts at a trace whose replays are alike
PREPARING = r"(?i)broadcast|copy|memcpy|memset"  # in names of kernels
NO_COMMAND_BUFFER = {"xla_gpu_graph_min_graph_size": 2**30}


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
      method: `PROFILER`, on GPUs of a command buffer or CUDA graph; `LAUNCHED`, of the same kernels without one;
        `GRAPH`, of a CUDA graph between two events; or `HOST_CLOCK`, the one that is no device time.
    """

    span: float
    kernels: dict[str, float]
    method: str = PROFILER

    @property
    def busy(self) -> float:
        """Time inside kernels."""
        return sum(self.kernels.values())

    def over(self, other: DeviceTime) -> float | None:
        """This span over the other's; None where one is device time and the other is not."""
        return self.span / other.span if (self.method == HOST_CLOCK) == (other.method == HOST_CLOCK) else None


def device_time(function: Callable[..., Any], *arguments: Any, calls: int) -> DeviceTime:
    """Time a jitted function that makes `calls` calls of the thing measured, on distinct arguments.

    Distinct, because XLA merges equal calls. On a GPU the function is one command buffer, unless that fails, as it does
    with kernels that need scratch memory, or hides kernels from the profiler, as XLA's ROCm collector may.
    """
    ways = {PROFILER: function}
    if jax.default_backend() == "gpu":
        ways[LAUNCHED] = jax.jit(function, compiler_options=NO_COMMAND_BUFFER)
    times: dict[str, DeviceTime | None] = {}
    failure = None
    for method, way in ways.items():
        try:
            for _ in range(3):
                jax.block_until_ready(way(*arguments))
        except jax.errors.JaxRuntimeError as error:
            failure = error
            continue
        time = times[method] = None
        if jax.default_backend() != "cpu":
            time = times[method] = traced(lambda way=way: jax.block_until_ready(way(*arguments)), calls, method)
        if time is not None and environment.lowering_platform() != "rocm":
            return time
    seen = [time for time in times.values() if time is not None]
    if seen:
        fullest = max(time.busy for time in seen)
        return next(time for time in seen if time.busy > fullest / 2)
    if failure is not None and not times:
        raise failure
    return _host_time(ways[next(iter(times))], arguments, calls)


def traced(replay: Callable[[], Any], calls: int, method: str = PROFILER) -> DeviceTime | None:
    """Time of a call from the profiler's trace of `replay`, which makes `calls` and waits for them.

    None where traces are laid out otherwise, or something else ran meanwhile.
    """
    for _ in range(TRACES):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(REPLAYS):
                    replay()
            chunks = _replays_of(_kernel_events(pathlib.Path(folder)), calls)
        if chunks is not None:
            spans = [max(end for _, _, end in chunk) - chunk[0][1] for chunk in chunks]
            inside = {
                name: statistics.median(sum(e - s for n, s, e in chunk if n == name) for chunk in chunks) / calls / 1e3
                for name in sorted({name for name, _, _ in chunks[0]})
            }
            return DeviceTime(statistics.median(spans) / calls / 1e3, inside, method)
    return None


def _replays_of(events: list[Event], calls: int) -> list[list[Event]] | None:
    """The events of each replay but the first, which warms the profiler up, without what only prepares the calls.

    None unless all replays ran the same kernels, and at least one a call.
    """
    size = len(events) // REPLAYS
    chunks = [events[i * size : (i + 1) * size] for i in range(1, REPLAYS)]
    alike = {tuple(sorted(name for name, _, _ in chunk)) for chunk in chunks}
    if size < calls or size * REPLAYS != len(events) or len(alike) != 1:
        return None
    return [_without_ends(chunk, calls) for chunk in chunks]


def _without_ends(chunk: list[Event], calls: int) -> list[Event]:
    """Less the fills and copies at both ends that ran less than once a call: they are of no single one."""
    kinds = [re.sub(r"[._]\d+$", "", name) for name, _, _ in chunk]  # XLA numbers its fusions
    count = collections.Counter(kinds)
    own = [i for i, kind in enumerate(kinds) if count[kind] >= calls or not re.search(PREPARING, kind)]
    return chunk[own[0] : own[-1] + 1] if own else chunk


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
                lines = [line for line in plane.lines if re.match(line_name, line.name)]
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
