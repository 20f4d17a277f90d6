"""A real jax-triton compiles a kernel for GPUs that are not here, through the stand-ins for vLLM's tensors."""

import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

if jax.__version_info__ >= (0, 12):
    pytest.skip("jax-triton 0.4.1 does not trace under this JAX", allow_module_level=True)
pytest.importorskip("jax_triton", reason="extra bench, Python >= 3.12")
from jax_triton import triton_lib

from m3_pallas.measure import environment, jax_triton_rocm, vllm, vllm_jax

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="takes the place of a GPU")
KERNEL = """
import torch
from vllm.triton_utils import tl, triton


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["width"])})
@triton.jit
def _copy_kernel(x, out, stride, width, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride
    tl.store(out + row + lane, tl.load(x + row + lane))


def minimax_m3_index_decode(query, *rest):
    out = torch.empty(query.shape, dtype=query.dtype)
    _copy_kernel[(query.shape[0],)](query, out, query.stride(0), query.shape[1], num_warps=1)
    return out
"""


@pytest.fixture
def kernels(monkeypatch):
    """What jax-triton hands to jaxlib: a list of arguments for each kernel."""
    made = []
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not said

    class Made:
        def __init__(self, *arguments):
            if isinstance(arguments[0], str) and len(arguments) >= 7:
                made.append(arguments)

        def to_proto(self, *arguments):
            return b""

    library = types.SimpleNamespace(
        TritonKernel=Made,
        TritonKernelCall=Made,
        TritonAutotunedKernelCall=Made,
        create_array_parameter=lambda *arguments: arguments,
        create_scalar_parameter=lambda *arguments: arguments,
        get_arch_details=lambda device: "gfx942:sramecc+:xnack-",
        get_compute_capability=lambda device: 90,
    )
    monkeypatch.setattr(triton_lib, "triton_kernel_call_lib", library)
    # Undone with the test: the patch is for one process on one platform.
    for name in ("compile_ttir_to_hsaco_inplace", "_m3_complete"):
        monkeypatch.setattr(triton_lib, name, getattr(triton_lib, name, False), raising=False)
    build = triton_lib.KernelSpecialization.__dict__["build"]
    monkeypatch.setattr(triton_lib.KernelSpecialization, "build", build)
    return made


def lower(tmp_path: pathlib.Path, monkeypatch, platform: str, dtype=jnp.float32) -> None:
    for file in vllm.FILES:
        path = tmp_path / vllm.OPS / (file.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(KERNEL if file.endswith("index_topk") else "")
    monkeypatch.setattr(environment, "lowering_platform", lambda: "rocm" if platform == "rocm" else "cpu")
    run = vllm_jax.JaxTritonPeers(tmp_path).chain("amd", "minimax_m3_index_decode", ())
    shape = jax.ShapeDtypeStruct((6, 256), dtype)
    jax.jit(run).trace((shape,)).lower(lowering_platforms=(platform,))


def test_strides_are_known_to_be_divisible(tmp_path, monkeypatch, kernels):
    """Else each lane would load its eight numbers one by one: 16 divides the stride, which jax-triton does not say."""
    lower(tmp_path, monkeypatch, "cuda")
    [(name, num_warps, _, _, ptx, *_)] = kernels
    assert (name, num_warps) == ("_copy_kernel", 1)
    assert ptx.count("ld.global.v4") == 2


def test_amd_compiles_with_ranges_and_without_scratch(tmp_path, monkeypatch, kernels):
    lower(tmp_path, monkeypatch, "rocm")
    [(name, num_warps, _, _, hsaco, ttir, *rest)] = kernels
    assert (name, num_warps) == ("_copy_kernel", 1)
    assert pathlib.Path(hsaco).read_bytes().startswith(b"\x7fELF")
    assert ttir.count("tt.pointer_range = 32") == 2
    assert len(rest) == 1  # neither a size of scratch memory nor its alignment


def test_an_array_too_large_for_buffer_instructions():
    small, large = (jax.core.ShapedArray((2**29 - 1 + extra,), jnp.dtype("float32")) for extra in (0, 1))
    assert jax_triton_rocm.num_bytes(small) <= jax_triton_rocm.BUFFER_BYTES < jax_triton_rocm.num_bytes(large)
    assert jax_triton_rocm.num_bytes(5) == 0
