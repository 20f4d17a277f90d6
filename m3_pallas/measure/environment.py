"""What is measured on: device, versions, and which implementation a call takes here and why."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
import numpy as np

import m3_pallas
from m3_pallas import implementations
from m3_pallas.measure import shapes
from m3_pallas.triton import device as triton_device

MEMORY_SHARE = 0.8  # of the free memory that may be used


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `implementation=None` takes."""

    implementation: str
    reason: str


def lowering_platform() -> str:
    """The platform that JAX lowers for here: "cuda" and "rocm" are both GPUs of JAX's "gpu" backend."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    version = jax.local_devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def choice(call: Callable[..., Any], *arrays: Any) -> Choice:
    """What `call(*arrays, implementation=None)` runs here."""
    lowered_for = lowering_platform()
    for name, served in implementations.PLATFORMS.items():
        if lowered_for in served:
            try:
                jax.eval_shape(functools.partial(call, implementation=name), *arrays)
            except NotImplementedError as error:
                return Choice("xla", str(error))
            return Choice(name, f"kernels for {lowered_for}")
    return Choice("xla", f"no kernels for {lowered_for}")


def choices() -> dict[str, Choice]:
    """For decode and prefill as MiniMax-M3 runs them."""
    decode = shapes.DecodeShape(1, 1, 1, 8192)
    prefill = shapes.PrefillShape(1, 256, 0)
    shape, i32 = jax.ShapeDtypeStruct, np.int32
    pages, table, one = shape((64, 128, 128), jax.numpy.bfloat16), shape((1, 64), i32), shape((1,), i32)
    query = shape((1, 1, 128), jax.numpy.bfloat16)
    queries = shape((256, 1, 128), jax.numpy.bfloat16)
    score: Callable[..., Any] = m3_pallas.minimax_m3_index_score
    return {
        "decode": choice(
            lambda *a, **o: m3_pallas.minimax_m3_index_decode(*a, *decode.statics, **o), query, pages, table, one
        ),
        "prefill": choice(
            lambda *a, **o: score(*a, *prefill.statics, **o),
            queries, pages, table, shape((2,), i32), one, one,
        ),
    }  # fmt: skip


def memory_bytes() -> int | None:
    """Bytes that the device's arrays may still take, or None where nobody says."""
    if jax.default_backend() == "cpu":
        try:
            lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        kib = dict(line.split(":") for line in lines).get("MemAvailable", "").split()
        return int(MEMORY_SHARE * 1024 * int(kib[0])) if kib else None
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return int(MEMORY_SHARE * free) if free > 0 else None


def describe() -> dict[str, Any]:
    """The head of every record."""
    device = jax.local_devices()[0]
    lowered_for = lowering_platform()
    architectures = {"cpu": platform.machine(), "tpu": device.device_kind}
    architecture = architectures.get(lowered_for) or triton_device.architecture(lowered_for)
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "platform": lowered_for,
        "architecture": architecture,
        "m3_pallas": m3_pallas.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "platform_version": " ".join(device.client.platform_version.split()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "implementations": {name: dataclasses.asdict(chosen) for name, chosen in choices().items()},
    }


def print_description(record: dict[str, Any]) -> None:
    print(f"{record['device']} ({record['platform']}, {record['architecture']})")
    versions = ", ".join(f"{name} {record[name]}" for name in ("m3_pallas", "jax", "jaxlib", "python"))
    print(f"{versions}; {record['platform_version']}")
    if record["xla_flags"]:
        print(f"XLA_FLAGS {record['xla_flags']}")
    for call, chosen in record["implementations"].items():
        print(f"{call}: {chosen['implementation']} ({chosen['reason']})")
