"""What jax-triton 0.4.1 leaves out when it compiles for AMD GPUs with Triton 3.7 or newer, filled in here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

BUFFER_BYTES = 2**31 - 1  # of an array that AMD's buffer instructions can address
POINTER_RANGE = ["tt.pointer_range", 32]


def complete() -> None:
    """Patch `jax_triton.triton_lib`, once a process."""
    if getattr(triton_lib, "_m3_complete", False):
        return
    triton_lib._m3_complete = True
    compile_hsaco = triton_lib.compile_ttir_to_hsaco_inplace
    build = triton_lib.KernelSpecialization.build.__func__

    def compile_complete(ttir: Any, backend: Any, options: Any) -> Any:
        result = compile_hsaco(ttir, _WithOptions(backend), options)
        # No scratch is None: JAX before 0.11.1 refuses a size, be it 0.
        return dataclasses.replace(result, global_scratch_size=result.global_scratch_size or None)

    def build_with_ranges(
        cls: Any, arg_names: Any, args: Any, arg_dtypes: Any, in_tree: Any, objpaths: Any, *rest: Any
    ):
        spec = build(cls, arg_names, args, arg_dtypes, in_tree, objpaths, *rest)
        for i, arg in enumerate(args):
            if 0 < num_bytes(arg) <= BUFFER_BYTES:
                kind, key = spec.specialization[i]
                spec.specialization[i] = kind, key + "S"  # Triton's own mark, also in the cache's key
                spec.attrs[objpaths[i]].append(POINTER_RANGE)
        return spec

    triton_lib.compile_ttir_to_hsaco_inplace = compile_complete
    triton_lib.KernelSpecialization.build = classmethod(build_with_ranges)


class _WithOptions:
    """Triton's backend, whose passes read options of the launch from the metadata."""

    def __init__(self, backend: Any):
        self._backend = backend

    def make_ttir(self, module: Any, metadata: dict, options: Any) -> Any:
        metadata |= vars(options)
        return self._backend.make_ttir(module, metadata, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def num_bytes(value: Any) -> int:
    """Of an array's type, plain or mutable; 0 of a number."""
    value = getattr(value, "inner_aval", value)
    if not hasattr(value, "shape"):
        return 0
    return math.prod(value.shape) * value.dtype.itemsize
