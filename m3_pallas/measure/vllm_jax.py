"""vLLM's kernels through jax-triton, without PyTorch: its own Python code runs on stand-ins for tensors.

While a jitted function is traced, vLLM's call is made with tensors that know their shape, dtype and strides. What it
allocates becomes a mutable array, and each kernel it launches becomes a `jax_triton.triton_call` with vLLM's own grid,
warps and stages. So its launch policy is its own too.
"""

from __future__ import annotations

import functools
import math
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import numpy as np
import triton

from m3_pallas.measure import environment
from m3_pallas.measure.profiling import DeviceTime, device_time
from m3_pallas.measure.vllm import Sources


def make(root: pathlib.Path) -> JaxTritonPeers:
    """The peers, if this jax-triton can trace a call under this JAX and compile it for the GPU that is here."""
    shape = jax.ShapeDtypeStruct
    arrays = (shape((1, 256, 128), jnp.bfloat16), shape((1, 1), jnp.int32), shape((1,), jnp.int32))
    try:
        peers = JaxTritonPeers(root)
        with jax.enable_x64(True):
            run = peers.chain("amd", "minimax_m3_index_decode", (128, 16, 0, 1, 1, 1, 1))
            traced = jax.jit(run).trace((shape((1, 1, 128), jnp.bfloat16),), *arrays)
            if jax.default_backend() == "gpu":
                traced.lower()  # compiles the kernels: an older Triton fails only here
    except Exception as error:
        versions = f"jax-triton {jax_triton.__version__} with JAX {jax.__version__}"
        raise NotImplementedError(f"{versions} cannot run vLLM's kernels ({type(error).__name__}: {error})") from error
    return peers


class Tensor:
    """As much of a contiguous `torch.Tensor` as vLLM's calls look at; `value` is a JAX array or a mutable one."""

    device = None

    def __init__(self, value: Any, *, mutable: bool = False):
        self.value = value
        self.mutable = mutable
        self.shape = tuple(value.shape)
        self.dtype = jnp.dtype(value.dtype)

    def stride(self, axis: int) -> int:
        return math.prod(self.shape[axis + 1 :]) if axis >= 0 else self.stride(axis + len(self.shape))

    def dim(self) -> int:
        return len(self.shape)


class Allocator:
    """Hands out the same arrays, in order, to each call of a chain: what PyTorch's allocator does on one stream."""

    def __init__(self):
        self.arrays: list[Tensor] = []
        self.next = 0

    def __call__(self, *shape: Any, dtype: Any, device: Any = None) -> Tensor:
        shape = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        if self.next == len(self.arrays):
            self.arrays.append(Tensor(jax.new_ref(jnp.zeros(shape, dtype)), mutable=True))
        array = self.arrays[self.next]
        if (array.shape, array.dtype) != (shape, jnp.dtype(dtype)):
            raise ValueError(f"a chain must make equal calls: allocated {array.shape}, then {shape}")
        self.next += 1
        return array


class Torch(types.ModuleType):
    """What vLLM's files use of torch."""

    Tensor = Tensor
    dtype = jnp.dtype

    def __init__(self):
        super().__init__("torch")
        self.allocate = Allocator()

    def empty(self, *shape, **options):
        return self.allocate(*shape, **options)

    zeros = empty  # new arrays are zero, and the only zeroed one, the counter, comes back zero

    @staticmethod
    def no_grad():
        return lambda function: function

    def __getattr__(self, name: str):
        try:
            return jnp.dtype(name)
        except TypeError:
            raise AttributeError(f"the stand-in for torch has no {name}") from None


class Launcher:
    """A kernel whose launches become `triton_call`s."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **options: Any) -> None:
        values, seen = [], []
        for argument in arguments:
            value = argument.value if isinstance(argument, Tensor) else argument
            if isinstance(argument, Tensor) and argument.mutable:
                if any(argument is other for other in seen):  # JAX takes no mutable array twice
                    value = jnp.zeros(1, argument.dtype)  # vLLM gives one twice where the kernel has no use for it
                seen.append(argument)
            values.append(value)
        kernel = self.kernel
        while isinstance(kernel, triton.runtime.Heuristics):  # jax-triton takes them inside an autotuner only
            named = dict(zip(kernel.arg_names, values, strict=False)) | options
            options |= {name: heuristic(named) for name, heuristic in kernel.values.items()}
            kernel = kernel.fn
        _fold_integers(kernel, values)
        jax_triton.triton_call(*values, kernel=kernel, out_type=(), grid=grid, **options)


def _fold_integers(kernel: Any, values: list[Any]) -> None:
    """Make constants of the integers that Triton specializes on, strides above all.

    Triton's own launcher tells the compiler which integers 16 divides; jax-triton 0.4.1 does not, and so the kernels
    would load element by element.
    """
    while isinstance(kernel, triton.runtime.Autotuner | triton.runtime.Heuristics):
        kernel = kernel.fn
    for parameter, value in zip(kernel.params, values, strict=False):
        if isinstance(value, int) and not parameter.do_not_specialize:
            vars(parameter)["is_constexpr"] = True
        else:
            vars(parameter).pop("is_constexpr", None)  # as the kernel declares it


def _capability() -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU that is here."""
    if environment.lowering_platform() != "cuda":
        return None
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    return int(major), int(minor)


class JaxTritonPeers:
    """See `vllm.Peers`."""

    name = "jax-triton"

    def __init__(self, root: pathlib.Path):
        self.torch = Torch()
        # jax-triton knows no programmatic dependent launch.
        self.sources = Sources(root, self.torch, capability=_capability(), pdl=False)
        self.sources.wrap_kernels(Launcher)
        if environment.lowering_platform() == "rocm":
            from m3_pallas.measure import jax_triton_rocm

            jax_triton_rocm.complete()

    def versions(self) -> dict[str, str]:
        return self.sources.versions() | {"jax-triton": jax_triton.__version__, "triton": triton.__version__}

    def chain(self, variant: str, call: str, statics: tuple):
        """A function that makes `call` on each of a tuple of first arguments, and returns the last result."""

        def run(firsts, *rest):
            self.torch.allocate = Allocator()
            with self.sources.stubs():
                function = getattr(self.sources.module(variant), call)
                results = []
                for first in firsts:
                    self.torch.allocate.next = 0
                    results.append(function(Tensor(first), *map(Tensor, rest), *statics))
            return results[-1].value[...]

        return run

    def decode(self, variant: str, queries: Any, arrays: tuple, statics: tuple) -> tuple[DeviceTime, np.ndarray]:
        with jax.enable_x64(True):  # the selector's partial results are 64-bit
            run = self.chain(variant, "minimax_m3_index_decode", statics)
            ids = np.asarray(jax.jit(run)(tuple(queries[:1]), *arrays))
            return device_time(jax.jit(run), tuple(queries), *arrays, calls=len(queries)), ids

    def prefill(
        self, variant: str, queries: Any, arrays: tuple, statics: tuple, topk: tuple
    ) -> tuple[DeviceTime, DeviceTime, np.ndarray]:
        _, _, starts, _, prefix = arrays
        with jax.enable_x64(True):
            score = self.chain(variant, "minimax_m3_index_score", statics)
            select = self.chain(variant, "minimax_m3_index_topk", (statics[0], *topk))
            score_time = device_time(jax.jit(score), tuple(queries), *arrays, calls=len(queries))
            scores = tuple(jax.jit(score)((q,), *arrays) for q in queries)
            select_time = device_time(jax.jit(select), scores, starts, prefix, calls=len(scores))
            return score_time, select_time, np.asarray(jax.jit(select)(scores[-1:], starts, prefix))
