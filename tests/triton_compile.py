"""Compile this library's Pallas-Triton kernels for a GPU that is not here, and read what the compiler made of them.

JAX lowers to Triton IR on any host; the `triton` wheel's own backend then yields the real machine code for AMD and
NVIDIA targets. Shared by the compile gates and `benchmarks/compiled.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import triton
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.triton import dialect as triton_dialect
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from triton.backends.compiler import GPUTarget

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA compiles; Triton 3.9 warns where it is not said
DEVICE_KINDS = {"gfx942": "gfx942", "gfx950": "gfx950", "sm_90": "NVIDIA H200"}


@dataclasses.dataclass(frozen=True)
class Report:
    """What one kernel compiled to. Registers are a lane's; occupancy is waves a SIMD (AMD) or warps an SM (NVIDIA)."""

    kernel: str
    arch: str
    warps: int
    stages: int
    registers: int
    spills: int
    scratch: int
    shared_bytes: int
    occupancy: int
    wide_loads: int
    matrix_ops: int
    text: str
    layouts: str  # Triton's IR for GPUs: which lanes hold and store what


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)


def lower(function: Callable[..., Any], arguments: tuple, arch: str) -> str:
    """StableHLO text of `function` for a GPU of that architecture."""
    platform = "cuda" if arch.startswith("sm_") else "rocm"
    device = AbstractDevice(device_kind=DEVICE_KINDS[arch], num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))


def compile_kernels(function: Callable[..., Any], arguments: tuple, arch: str) -> list[Report]:
    """Compile every Triton kernel in `function` for `arch`."""
    module = lower(function, arguments, arch).compiler_ir("stablehlo")
    configs: list[dict] = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call" and "triton" in str(operation.attributes["call_target_name"]):
            configs.append({item.name: item.attr for item in operation.attributes["mhlo.backend_config"]})
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return [_compile(config, arch) for config in configs]


def _compile(config: dict, arch: str) -> Report:
    value = {key: ir.IntegerAttr(config[key]).value for key in ("num_warps", "num_stages")}
    with mlir.make_ir_context() as context, ir.Location.unknown():
        triton_dialect.register_dialect(context)
        kernel_ir = ir.Module.parse(config["ir"].value_bytes).operation.get_asm()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.ttir"
        path.write_text(kernel_ir)
        with contextlib.redirect_stderr(None):
            kernel = triton.compile(str(path), target=target_of(arch), options=value)
    name = ir.StringAttr(config["name"]).value
    read = _read_nvidia if arch.startswith("sm_") else _read_amd
    return read(kernel, name, arch, value["num_warps"], value["num_stages"])


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return int(match.group(1))


def _read_amd(kernel, name: str, arch: str, warps: int, stages: int) -> Report:
    text = kernel.asm["amdgcn"]
    return Report(
        kernel=name,
        arch=arch,
        warps=warps,
        stages=stages,
        registers=_number(r"; (?:Total)?NumVgprs: (\d+)", text),
        spills=_number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.sgpr_spill_count:\s+(\d+)", text),
        scratch=_number(r"; ScratchSize: (\d+)", text),
        shared_bytes=kernel.metadata.shared,
        occupancy=_number(r"; Occupancy: (\d+)", text),
        wide_loads=_count(r"(?:global|buffer)_load_dwordx4", text),
        matrix_ops=_count(r"v_mfma_", text),
        text=text,
        layouts=kernel.asm["ttgir"],
    )


def _read_nvidia(kernel, name: str, arch: str, warps: int, stages: int) -> Report:
    text = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers = _number(r"REG:(\d+)", usage)
    shared = kernel.metadata.shared
    by_registers = 65536 // (32 * warps * max(8, -(-registers // 8) * 8))
    by_shared = 227 * 1024 // shared if shared else 32
    return Report(
        kernel=name,
        arch=arch,
        warps=warps,
        stages=stages,
        registers=registers,
        spills=_number(r"LOCAL:(\d+)", usage),
        scratch=_number(r"STACK:(\d+)", usage),
        shared_bytes=shared,
        occupancy=min(64, warps * min(by_registers, by_shared, 32)),
        wide_loads=_count(r"ld\.global[.\w:]*\.v4\.b32|cp\.async\.cg[^;]*0x10|ld\.global[.\w:]*\.v2\.b64", text),
        matrix_ops=_count(r"wgmma\.mma_async|mma\.sync", text),
        text=text,
        layouts=kernel.asm["ttgir"],
    )
