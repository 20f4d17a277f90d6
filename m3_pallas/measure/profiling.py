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
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

PROFILER, HOST_CLOCK = "profiler", "host clock"
# The lines of a trace that hold what ran on the device, by what the plane's name contains.
DEVICE_LINES = {"/device:GPU": "Stream", "/device:TPU": "XLA Ops"}
HOST_CHAIN_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Median times of one replay, in microseconds a call.

    Attributes:
      span: from the first kernel's start to the last one's end, gaps included.
      kernels: time inside each kernel, by name; empty by the host's clock.
      method: `PROFILER` or `HOST_CLOCK`.
    """

    span: float
    kernels: dict[str, float]
    method: str = PROFILER


def device_time(function: Callable[..., Any], *arguments: Any, calls: int, replays: int = 7) -> DeviceTime:
    """Time a jitted function that makes `calls` calls of the thing measured, on distinct arguments.

    Distinct, because XLA merges equal calls. Enough of them that the function runs as one command buffer.
    """
    for _ in range(3):
        jax.block_until_ready(function(*arguments))
    if jax.default_backend() == "cpu":
        return _host_time(function, arguments, calls)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(replays):
                jax.block_until_ready(function(*arguments))
        events = _kernel_events(pathlib.Path(folder))
    if not events or len(events) % replays:
        # A platform whose trace is laid out otherwise, or did something else meanwhile.
        return _host_time(function, arguments, calls)
    size = len(events) // replays
    chunks = [events[i * size : (i + 1) * size] for i in range(1, replays)]  # the first replay warms the profiler up
    spans = [(max(end for _, _, end in chunk) - chunk[0][1]) / calls / 1e3 for chunk in chunks]
    names = sorted({name for name, _, _ in events})
    inside = {
        name: statistics.median(sum(e - s for n, s, e in chunk if n == name) for chunk in chunks) / calls / 1e3
        for name in names
    }
    return DeviceTime(statistics.median(spans), inside)


def _host_time(function: Callable[..., Any], arguments: tuple, calls: int) -> DeviceTime:
    """The best of five chains, each of several tenths of a second, dispatched without waiting in between."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    length = max(1, round(HOST_CHAIN_SECONDS / max(time.perf_counter() - start, 1e-7)))
    spans = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(length)][-1])
        spans.append((time.perf_counter() - start) / length / calls * 1e6)
    return DeviceTime(min(spans), {}, HOST_CLOCK)


def _kernel_events(folder: pathlib.Path) -> list[tuple[str, float, float]]:
    """Name, start and end in ns of everything that ran on the first device, by start."""
    [path] = folder.rglob("*.xplane.pb")
    for plane in sorted(jax.profiler.ProfileData.from_file(str(path)).planes, key=lambda plane: plane.name):
        for device, line_name in DEVICE_LINES.items():
            if device in plane.name:
                lines = [line for line in plane.lines if line_name in line.name]
                events = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for line in lines for e in line.events]
                if events:
                    return sorted(events, key=lambda event: event[1])
    return []


def read_ceiling(num_bytes: int = 2 << 30) -> float:
    """GB/s of XLA's own reductions over `num_bytes`: the better of a bfloat16 maximum and a float32 sum."""
    best = 0.0
    for dtype, reduce in (
        (jnp.bfloat16, lambda x: jnp.max(jnp.abs(x), axis=1)),
        (jnp.float32, partial(jnp.sum, axis=1)),
    ):
        values = jnp.ones((8, num_bytes // 8 // jnp.dtype(dtype).itemsize), dtype)
        best = max(best, num_bytes / device_time(jax.jit(reduce), values, calls=1).span / 1e3)
    return best


def matrix_ceiling(size: int = 8192) -> float:
    """TFLOP/s of one product of `size * size * size` normal bfloat16 numbers."""
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    return 2 * size**3 / device_time(jax.jit(lambda x, y: x @ y), left, right, calls=1).span / 1e6


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
