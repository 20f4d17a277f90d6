"""`python -m m3_pallas check`: golden cases and the tiny M3, compiled on this device, against the NumPy oracle."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from m3_pallas import implementations
from m3_pallas.measure import calls, cases, environment, progress, tiny_m3
from m3_pallas.measure.cases import CASES, Decode, Prefill
from m3_pallas.measure.output import CANNOT_START, DIFFERENT, INTERRUPTED, check_file, error_line, write_json


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one case went.

    Attributes:
      implementation: what runs for it, by `implementation=None` or by name; of prefill's two calls both if they differ.
      rows: rows of ids compared.
      problem: what differs, or the exception; empty if all agree.
      not_served: why the implementation that was asked for cannot serve it; empty if it can.
    """

    name: str
    implementation: str
    rows: int = 0
    problem: str = ""
    not_served: str = ""


def all_cases() -> list[tuple[str, Decode | Prefill, dict]]:
    inputs = {Decode: cases.decode_inputs, Prefill: cases.prefill_inputs}
    return [(name, case, inputs[type(case)](case)) for name, case in CASES.items()] + tiny_m3.cases()


def run_case(name: str, case: Decode | Prefill, inputs: dict, options: dict[str, Any]) -> Outcome:
    """Run one case compiled, and compare ids, -inf mask, scores and page-16 tables."""
    chosen = options.get("implementation")
    try:
        if chosen is None:
            chosen = chosen_for(case, inputs)
        call: Callable[..., Any] = calls.decode if isinstance(case, Decode) else calls.prefill
        result = call(case, inputs, **options)
        problems, rows = compare(name, case, inputs, result)
    except Exception as error:  # whatever a device does, the table says it
        if "implementation" in options and isinstance(error, implementations.NotServedError):
            return Outcome(name, chosen or "?", not_served=str(error))
        return Outcome(name, chosen or "?", problem=error_line(error))
    return Outcome(name, chosen, rows, "; ".join(problems))


def chosen_for(case: Decode | Prefill, inputs: dict) -> str:
    """What `implementation=None` runs for a case."""
    if isinstance(case, Decode):
        return environment.choice(functools.partial(calls.decode, case, inputs)).implementation
    score = functools.partial(calls.prefill_score, case, inputs)
    topk = functools.partial(calls.prefill_topk, case, inputs)
    both = environment.choice(score), environment.choice(topk, jax.eval_shape(score))
    return ", ".join(dict.fromkeys(chosen.implementation for chosen in both))


def compare(name: str, case: Decode | Prefill, inputs: dict, result: Any) -> tuple[list[str], int]:
    """What differs from the oracle, and from vLLM's page-16 tables; the number of rows compared."""
    problems = []
    if isinstance(case, Decode):
        ids = result if case.table_stride is None else result.topk_idx
        expected = calls.decode_oracle(case, inputs)[0]
        if case.table_stride is not None:
            for part in ("sparse_block_table", "sparse_context_lens"):
                problems += differing(part, getattr(result, part), cases.golden()[f"{name}/{part}"])
    else:
        score, ids = result
        expected_score, expected = calls.prefill_oracle(case, inputs)
        try:
            calls.assert_scores(
                score, expected_score, calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"])
            )  # fmt: skip
        except AssertionError as error:
            problems.append("scores: " + " ".join(str(error).split())[:200])
    return problems + differing("ids", ids, expected), expected.shape[0] * expected.shape[1]


def differing(what: str, actual: Any, expected: np.ndarray) -> list[str]:
    """Rows of the last axis that are not equal, or entries of a vector."""
    different = np.asarray(actual) != expected
    if different.ndim > 1:
        different = different.any(-1)
    return [f"{what}: {different.sum()} of {different.size} rows differ"] if different.any() else []


def run(options: argparse.Namespace) -> int:
    """Print a table.

    Returns:
      0 if every case agrees; with --implementation, every case that it serves, and it serves one. 1 if not, 2 if the
      record cannot be written, 130 if interrupted.
    """
    try:
        check_file(options.json)
    except OSError as error:
        print(f"m3_pallas check: {error}", file=sys.stderr)
        return CANNOT_START
    record = environment.describe() | {"asked_for": options.implementation, "interrupted": False}
    environment.print_description(record)
    named = {} if options.implementation is None else {"implementation": options.implementation}
    outcomes: list[Outcome] = []
    try:
        for case in progress.bar(all_cases(), "check"):
            outcomes.append(run_case(*case, named))
    except KeyboardInterrupt:
        record["interrupted"] = True
    print(f"\n{'case':<28}{'implementation':<20}{'rows':>6}  result")
    for outcome in outcomes:
        result = outcome.problem or (outcome.not_served and f"not served: {outcome.not_served}") or "equal"
        print(f"{outcome.name:<28}{outcome.implementation:<20}{outcome.rows:>6}  {result}")
    served = [outcome for outcome in outcomes if not outcome.not_served]
    failed = sum(bool(outcome.problem) for outcome in served)
    print(f"\n{len(served) - failed} of {len(served)} cases equal the oracle on {record['device']}", end="")
    print(f", {len(outcomes) - len(served)} not served" if len(served) < len(outcomes) else "")
    if record["interrupted"]:
        print("interrupted: the other cases have not run")
    if options.json is not None and outcomes:
        write_json(options.json, record | {"cases": [dataclasses.asdict(o) for o in outcomes], "failed": failed})
    if record["interrupted"]:
        return INTERRUPTED
    return DIFFERENT if failed or not served else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementation", choices=implementations.NAMES, help="instead of the one that None takes here"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the outcomes here")
