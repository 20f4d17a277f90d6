"""Device time of jitted JAX calls, read from the profiler's trace: host clocks are useless below 50 us."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """Median times of one replay, in microseconds a call.

    Attributes:
      span: from the first kernel's start to the last one's end, gaps included.
      kernels: time inside each kernel, by name.
    """

    span: float
    kernels: dict[str, float]


def device_time(function: Callable[..., Any], *arguments: Any, calls: int, replays: int = 7) -> DeviceTime:
    """Time a jitted function that makes `calls` calls of the thing measured, on distinct arguments.

    Distinct, because XLA merges equal calls. Enough of them that the function runs as one command buffer.
    """
    for _ in range(3):
        jax.block_until_ready(function(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(replays):
                jax.block_until_ready(function(*arguments))
        events = _kernel_events(pathlib.Path(folder))
    if not events or len(events) % replays:
        raise RuntimeError(f"the trace holds {len(events)} kernels, not the same number in each of {replays} replays")
    size = len(events) // replays
    chunks = [events[i * size : (i + 1) * size] for i in range(1, replays)]  # the first replay warms the profiler up
    spans = [(max(end for _, _, end in chunk) - chunk[0][1]) / calls / 1e3 for chunk in chunks]
    names = sorted({name for name, _, _ in events})
    inside = {
        name: statistics.median(sum(e - s for n, s, e in chunk if n == name) for chunk in chunks) / calls / 1e3
        for name in names
    }
    return DeviceTime(statistics.median(spans), inside)


def _kernel_events(folder: pathlib.Path) -> list[tuple[str, float, float]]:
    """Name, start and end in ns of everything that ran on the GPU's streams, by start."""
    [path] = folder.rglob("*.xplane.pb")
    events = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                events += [(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return sorted(events, key=lambda event: event[1])


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
