"""What the TPU kernels share: what they cannot serve and why, the interpreter's checks, copies of pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m3_pallas.rules import BLOCK_SIZE

LANES = 128
MIN_DIM = 128
STEP_PAGES = 8  # pages of one product: their maxima fill one tile of sublanes
VMEM_BYTES = 48 << 20  # asked of the compiler, which gives 16 MiB unasked; tpu7x has 64 MiB, v5e and v6e 128 MiB
VMEM_ARRAYS = 32 << 20  # of them, for what a kernel declares; products and their masks take the rest
SMEM_BYTES = 512 << 10  # for lengths, segments and table rows; chips have 1 MiB


def unsupported_cache(idx_q: jax.Array, pages: jax.Array) -> str | None:
    """Why no kernel serves this head dim or these dtypes, or None."""
    dim = pages.shape[-1]
    if dim % MIN_DIM:
        return f"head dim {dim} is not a multiple of {MIN_DIM}; use None or 'xla'"
    for name, dtype in (("idx_q", idx_q.dtype), ("index_kv_cache", pages.dtype)):
        if dtype == jnp.float16:
            return f"{name} of float16 is not served, no TPU loads it; use bfloat16, None or 'xla'"
    return None


def unsupported_memory(vmem: int, smem: int) -> str | None:
    """Why a kernel's arrays of so many bytes do not fit on the chip, or None."""
    for name, need, limit in (("VMEM", vmem, VMEM_ARRAYS), ("scalar memory", smem, SMEM_BYTES)):
        if need > limit:
            return f"these shapes need {need} bytes of {name}, above {limit}; use None or 'xla'"
    return None


def step_bytes(dim: int) -> int:
    """VMEM of a step's keys, cast for the product."""
    return STEP_PAGES * BLOCK_SIZE * dim * 4


def interpret_params(interpret: bool):
    """Of `pallas_call`: the TPU interpreter with its checks for races, reads out of bounds, memory never written.

    A race raises where JAX knows `on_race`; an older one prints "RACE DETECTED".
    """
    if not interpret:
        return False
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    on_race: dict[str, Any] = {"on_race": "raise"} if "on_race" in fields else {}
    return pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", **on_race
    )  # fmt: skip


def for_pages(pages_ref, page_of, first, count, buffer_ref, sem, act) -> None:
    """`act` on the copy of each of a step's pages: page `page_of(first + i)` to `buffer_ref[i]`, while `i < count`."""
    for i in range(STEP_PAGES):

        @pl.when(i < count)
        def _(i=i):
            page = jnp.clip(page_of(first + i), 0, pages_ref.shape[0] - 1)
            act(pltpu.make_async_copy(pages_ref.at[page], buffer_ref.at[i], sem))
