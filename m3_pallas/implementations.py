"""The names of the implementations, and the choice between them by the platform being lowered for."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.interpreters import mlir

Implementation: TypeAlias = Literal["xla", "pallas_triton", "pallas_mosaic_tpu"]
NAMES: tuple[str, ...] = get_args(Implementation)
# `jax.export.export(..., disabled_checks=EXPORT_DISABLED_CHECKS)` lets the Triton kernels' custom call through: JAX
# promises no compatibility across versions for it.
EXPORT_DISABLED_CHECKS = (jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton"),)
PLATFORMS = {"xla": (), "pallas_triton": ("cuda", "rocm"), "pallas_mosaic_tpu": ("tpu",)}


class NotServedError(NotImplementedError):
    """A named implementation cannot serve the call; the message says why, and what to use instead."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of one call.

    Attributes:
      name: one of `NAMES`.
      run: takes the call's arrays and, unless it is "xla", the keyword `platform`, one of the implementation's.
      reason: why it cannot serve these shapes and dtypes, with what to use instead; None if it can.
    """

    name: str
    run: Callable[..., Any]
    reason: str | None = None


def check_options(implementation: str | None, interpret: bool, launch: Any, launch_type: type) -> None:
    """The keyword options of the three calls, the same for every implementation."""
    if implementation is not None and not (isinstance(implementation, str) and implementation in NAMES):
        names = ", ".join(repr(name) for name in NAMES)
        raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")
    if not isinstance(interpret, bool):
        raise TypeError(f"interpret must be a bool, got {interpret!r}")
    if launch is not None and not isinstance(launch, launch_type):
        raise TypeError(f"launch must be None or a {launch_type.__name__}, got {launch!r}")


def run(implementation: str | None, call: str, candidates: Sequence[Candidate], *arrays: Any, interpret: bool) -> Any:
    """Run the named candidate, or with None the one whose platform is being lowered for, else XLA.

    Raises:
      NotServedError: if a named implementation cannot serve, when traced or, on another platform, when lowered.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    xla = by_name["xla"].run
    if implementation == "xla":
        return xla(*arrays)
    if implementation is not None:
        chosen = by_name[implementation]
        if chosen.reason is not None:
            raise NotServedError(f"{call} with implementation={implementation!r}: {chosen.reason}")
        branches = _branches(chosen)
        if interpret:
            return next(iter(branches.values()))(*arrays)
        platforms = ", ".join(branches)
        reason = f"runs on {platforms} only; use None, 'xla' or interpret=True"
        return lax.platform_dependent(
            *arrays,
            default=functools.partial(_refuse, f"{call} with implementation={implementation!r}: {reason}", xla),
            **branches,
        )
    branches = {}
    for candidate in candidates:
        if candidate.reason is None:
            branches |= _branches(candidate)
    return lax.platform_dependent(*arrays, default=xla, **branches) if branches else xla(*arrays)


def _branches(candidate: Candidate) -> dict[str, Callable[..., Any]]:
    """Of each platform. Mosaic batches no array that stays in HBM, so that `vmap` runs its kernels one by one."""
    branches = {platform: functools.partial(candidate.run, platform=platform) for platform in PLATFORMS[candidate.name]}
    return {name: sequential_vmap(run) if name == "tpu" else run for name, run in branches.items()}


_refuse_p = jax.extend.core.Primitive("m3_pallas_refuse")
_refuse_p.def_abstract_eval(lambda x, *, message: x)


def _refuse_lowering(ctx, x, *, message):
    raise NotServedError(message)


mlir.register_lowering(_refuse_p, _refuse_lowering)


def _refuse(message: str, shape_of: Callable[..., Any], *arrays: Any) -> Any:
    """Results shaped as `shape_of`'s, whose lowering raises `message`."""
    shapes = jax.eval_shape(shape_of, *arrays)
    return jax.tree.map(lambda s: _refuse_p.bind(jnp.zeros(s.shape, s.dtype), message=message), shapes)
