"""The names of the implementations, and the choice between them by the platform being lowered for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from jax import lax

Implementation: TypeAlias = Literal["xla", "pallas_triton", "pallas_mosaic_tpu"]
NAMES: tuple[str, ...] = get_args(Implementation)
NOT_YET = "no kernel yet; use None or 'xla'"
PLATFORMS = {"xla": (), "pallas_triton": ("cuda", "rocm"), "pallas_mosaic_tpu": ("tpu",)}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of one call.

    Attributes:
      name: one of `NAMES`.
      run: takes the call's arrays.
      reason: why it cannot serve these shapes and dtypes, with what to use instead; None if it can.
    """

    name: str
    run: Callable[..., Any]
    reason: str | None = None


def check_options(implementation: str | None, interpret: bool, launch: Any, launch_type: type) -> None:
    """The keyword options of the three calls, the same for every implementation."""
    if implementation is not None and implementation not in NAMES:
        names = ", ".join(repr(name) for name in NAMES)
        raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")
    if not isinstance(interpret, bool):
        raise TypeError(f"interpret must be a bool, got {interpret!r}")
    if launch is not None and not isinstance(launch, launch_type):
        raise TypeError(f"launch must be None or a {launch_type.__name__}, got {launch!r}")


def run(implementation: str | None, call: str, candidates: Sequence[Candidate], *arrays: Any) -> Any:
    """Run the named candidate, or with None the one whose platform is being lowered for, else XLA.

    Raises:
      NotImplementedError: if a named implementation cannot serve.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    if implementation is not None:
        chosen = by_name[implementation]
        if chosen.reason is not None:
            raise NotImplementedError(f"{call} with implementation={implementation!r}: {chosen.reason}")
        return chosen.run(*arrays)
    branches = {
        platform: candidate.run
        for candidate in candidates
        if candidate.reason is None
        for platform in PLATFORMS[candidate.name]
    }
    if not branches:
        return by_name["xla"].run(*arrays)
    return lax.platform_dependent(*arrays, default=by_name["xla"].run, **branches)
