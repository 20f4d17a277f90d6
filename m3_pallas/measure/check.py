"""`python -m m3_pallas check`: golden cases and the tiny M3, compiled on this device, against the NumPy oracle."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from m3_pallas import implementations
from m3_pallas.measure import calls, cases, environment, progress, tiny_m3
from m3_pallas.measure.cases import CASES, Decode, Prefill


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one case went.

    Attributes:
      implementation: what `implementation=None` runs for it.
      rows: rows of ids compared.
      problem: what differs, or the exception; empty if all agree.
    """

    name: str
    implementation: str
    rows: int
    problem: str


def all_cases() -> list[tuple[str, Decode | Prefill, dict]]:
    inputs = {Decode: cases.decode_inputs, Prefill: cases.prefill_inputs}
    return [(name, case, inputs[type(case)](case)) for name, case in CASES.items()] + tiny_m3.cases()


def run_case(name: str, case: Decode | Prefill, inputs: dict, options: dict[str, Any]) -> Outcome:
    """Run one case compiled, and compare ids, -inf mask, scores and page-16 tables."""
    call: Callable[..., Any] = calls.decode if isinstance(case, Decode) else calls.prefill
    chosen = options.get("implementation")
    rows = 0
    try:
        if chosen is None:
            chosen = environment.choice(lambda **named: call(case, inputs, **named)).implementation
        problems, rows = compare(name, case, inputs, call(case, inputs, **options))
    except Exception as error:  # whatever a device does, the table says it
        problems = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return Outcome(name, chosen or "?", rows, "; ".join(problems))


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
    unequal = int(np.sum(np.any(np.asarray(actual) != expected, axis=-1)))
    return [f"{what}: {unequal} of {np.prod(expected.shape[:-1], dtype=int)} rows differ"] if unequal else []


def run(options: argparse.Namespace) -> int:
    """Print a table; 0 if every case agrees, else 1."""
    record = environment.describe()
    environment.print_description(record)
    named = {} if options.implementation is None else {"implementation": options.implementation}
    outcomes = [run_case(*case, named) for case in progress.bar(all_cases(), "check")]
    print(f"\n{'case':<28}{'implementation':<20}{'rows':>6}  result")
    for outcome in outcomes:
        print(f"{outcome.name:<28}{outcome.implementation:<20}{outcome.rows:>6}  {outcome.problem or 'equal'}")
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    print(f"\n{len(outcomes) - failed} of {len(outcomes)} cases equal the oracle on {record['device']}")
    if options.json is not None:
        write_json(options.json, record | {"cases": [dataclasses.asdict(o) for o in outcomes], "failed": failed})
    return 1 if failed else 0


def write_json(file: pathlib.Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementation", choices=implementations.NAMES, help="instead of the one that None takes here"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the outcomes here")
