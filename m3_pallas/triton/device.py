"""What the Triton kernels need to know of JAX and of the device: availability, architecture, the call itself."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from m3_pallas.manual_axes import outputs_like

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # a JAX that has dropped Pallas on Triton
    plgpu = None

DEFAULT_ARCH = {"rocm": "gfx942", "cuda": "sm_90"}  # where only the platform is known


def unavailable(*, interpret: bool) -> str | None:
    """Why Pallas kernels cannot be lowered through Triton here, or interpreted, or None if they can."""
    if plgpu is None:
        return f"JAX {jax.__version__} has no Pallas Triton backend; use None or 'xla', or an older JAX"
    if interpret:
        return None
    get_gpu_info = getattr(plgpu, "get_gpu_info", None)  # since JAX 0.11, lowering asks for the device
    if get_gpu_info is not None:
        try:
            get_gpu_info()
        except ValueError:
            return (
                "no GPU to compile for; use None or 'xla', interpret=True, or trace inside "
                "jax.sharding.use_abstract_mesh with an AbstractDevice of the target, such as 'gfx950'"
            )
    return None


def architecture(platform: str) -> str:
    """The architecture being compiled for, such as "gfx950" or "sm_90": of the abstract device, else of the default."""
    kinds = []
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        kinds.append(abstract.device_kind)
    else:
        device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
        kinds += [getattr(device, "compute_capability", None), getattr(device, "device_kind", None)]
    for kind in kinds:
        if isinstance(kind, str) and kind.startswith("gfx"):
            return kind.split(":")[0]  # "gfx942:sramecc+:xnack-"
        if isinstance(kind, str) and kind.replace(".", "").isdigit():
            return "sm_" + kind.replace(".", "")
    return DEFAULT_ARCH[platform]


def divmod_static(value: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a traced int of at least 0 by a static one; Triton cannot lower a division by 1."""
    if divisor == 1:
        return value, jnp.int32(0)
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: int,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int | None,
    num_stages: int | None,
    aliases: dict[int, int],
    interpret: bool,
) -> Callable[..., Any]:
    """A `pallas_call` over whole arrays in device memory, one program per grid point."""
    # JAX 0.11 deprecates this backend, the only Pallas one on ROCm. Its users need no reminder on every lowering.
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    assert plgpu is not None
    params = plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)

    def run(*operands):
        return pl.pallas_call(
            kernel,
            grid=(grid,),
            out_shape=outputs_like(tuple(out_shape), *operands),
            input_output_aliases=aliases,
            compiler_params=params,
            interpret=interpret,
            name=name,
        )(*operands)

    return run
