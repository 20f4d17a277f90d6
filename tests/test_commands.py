"""`python -m m3_pallas check` and `bench`, on the CPU: small sizes, records, bad arguments, interruption."""

import json

import jax
import numpy as np
import pytest

import m3_pallas
from m3_pallas.__main__ import main
from m3_pallas.measure import bench, check, environment, profiling, report, rows, shapes
from m3_pallas.measure.calls import decode_oracle, prefill_oracle
from m3_pallas.measure.cases import CASES, Prefill, decode_inputs, prefill_inputs

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="expects what a CPU answers")
DESCRIPTION = {"device", "platform", "architecture", "m3_pallas", "jax", "jaxlib", "python", "implementations"}
SMALL = ["bench", "--requests", "2", "--heads", "1", "--contexts", "1K", "--tokens", "128"]


@pytest.fixture
def few_cases(monkeypatch):
    """The commands' own cases, three of them."""
    kept = ("decode_table_stride8", "prefill_empty_request")
    kept = [case for case in check.all_cases() if case[0] in (*kept, "tiny M3, decode")]
    monkeypatch.setattr(check, "all_cases", lambda: kept)


def test_check(few_cases, tmp_path, capsys):
    file = tmp_path / "check.json"
    assert main(["check", "--json", str(file)]) == 0
    assert "3 of 3 cases equal the oracle" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record.keys() == DESCRIPTION | {"cases", "failed"}
    assert record["failed"] == 0
    assert record["implementations"]["decode"] == {"implementation": "xla", "reason": "no kernels for cpu"}
    # 5 one-head rows; 110 one-head rows; 48 steps of 4 requests with 2 heads
    assert [case["rows"] for case in record["cases"]] == [5, 110, 384]
    assert {case["problem"] for case in record["cases"]} == {""}


def test_check_covers_every_golden_case_and_the_tiny_m3():
    assert {name for name, *_ in check.all_cases()} == {*CASES, "tiny M3, decode", "tiny M3, prefill"}


def test_check_reports_what_differs(few_cases, tmp_path, capsys, monkeypatch):
    right = m3_pallas.minimax_m3_index_topk
    monkeypatch.setattr(
        m3_pallas, "minimax_m3_index_topk", lambda *a, **options: right(*a, **options).at[0, 3, 0].add(1)
    )  # fmt: skip
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "ids: 1 of 110 rows differ" in out
    assert "2 of 3 cases equal" in out


def test_check_reports_exceptions(few_cases, capsys):
    assert main(["check", "--implementation", "pallas_mosaic_tpu"]) == 1
    out = capsys.readouterr().out
    assert out.count("NotImplementedError: ") == 3
    assert "runs on tpu only" in out


@pytest.mark.parametrize("spoil", [lambda s: s.at[0, 3, 0].add(1.0), lambda s: s.at[0, 3, 15].set(0.0)])
def test_comparison_sees_scores_and_their_mask(spoil):
    case = CASES["prefill_empty_request"]
    inputs = prefill_inputs(case)
    score, ids = prefill_oracle(case, inputs)
    assert check.compare("", case, inputs, (score, ids)) == ([], 110)
    [problem], _ = check.compare("", case, inputs, (spoil(jax.numpy.asarray(score)), ids))
    assert problem.startswith("scores: ")


def test_comparison_sees_page_tables():
    name = "decode_table_stride8"
    case, inputs = CASES[name], decode_inputs(CASES[name])
    ids = decode_oracle(case, inputs)[0]
    wrong = m3_pallas.IndexDecodeResult(ids, np.ones((5, 128), np.int32), np.ones(5, np.int32), None)
    problems, _ = check.compare(name, case, inputs, wrong)
    assert [problem.split(":")[0] for problem in problems] == ["sparse_block_table", "sparse_context_lens"]


def test_bench(tmp_path, capsys):
    json_file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*SMALL, "--json", str(json_file), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert out.count("(host clock)") == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(json_file.read_text())
    assert record.keys() == DESCRIPTION | {
        "date", "topk", "decode", "prefill", "interrupted", "geometric_means", "read_ceiling_gb_per_s",
        "matrix_ceiling_tflop_per_s",
    }  # fmt: skip
    [decode], [prefill] = record["decode"], record["prefill"]
    assert decode["shape"] == "R 2 H 1 q 1 1K"
    assert decode["bytes"] == 2 * 1024 * 128 * 2
    assert decode["method"] == prefill["method"] == profiling.HOST_CLOCK
    assert decode["gb_per_s"] == pytest.approx(decode["bytes"] / decode["call_us"] / 1e3)
    assert decode["share_of_ceiling"] == pytest.approx(decode["gb_per_s"] / record["read_ceiling_gb_per_s"])
    assert decode["xla_way_over_ours"] == pytest.approx(decode["xla_way_us"] / decode["call_us"])
    assert prefill["shape"] == "H 1 T 128 prefix 896"
    assert prefill["flops"] == 2 * 128 * 128 * 8 * 128
    assert prefill["tflop_per_s"] == pytest.approx(prefill["flops"] / prefill["score_us"] / 1e6)
    assert prefill["combined_equal"]
    assert record["geometric_means"] == {"decode xla_way_over_ours": pytest.approx(decode["xla_way_over_ours"])}
    assert not record["interrupted"]
    assert "| R 2 H 1 q 1 1K | - | - |" in report.markdown(record)


def test_interrupted_bench_keeps_its_rows(tmp_path, capsys, monkeypatch):
    measured = []

    def row(shape, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(shape)
        return {"shape": str(shape), "score_us": None, "selection_us": None, "call_us": 2.0, "gb_per_s": 1.0,
                "share_of_ceiling": 0.5}  # fmt: skip

    monkeypatch.setattr(rows, "decode_row", row)
    monkeypatch.setattr(profiling, "read_ceiling", lambda num_bytes: 2.0)
    file = tmp_path / "bench.json"
    assert main(["bench", "--requests", "1,2", "--heads", "1", "--contexts", "1K", "--json", str(file)]) == 130
    assert "interrupted" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["interrupted"]
    assert [row["shape"] for row in record["decode"]] == ["R 1 H 1 q 1 1K"]
    assert record["prefill"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["chek"], ["check", "--implementation", "cuda"], ["bench", "--contexts", "8X"],
        ["bench", "--requests", "0"], ["bench", "--heads", "1,"], ["bench", "--query-len", "9"],
    ],
)  # fmt: skip
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: python -m m3_pallas" in capsys.readouterr().err


def test_too_little_memory(capsys, monkeypatch):
    monkeypatch.setattr(environment, "memory_bytes", lambda: 10**9)
    assert main(["bench", "--requests", "64", "--contexts", "1M", "--heads", "1"]) == 2
    assert "R 64 H 1 q 1 1M needs 51.5 GB and 1.0 GB are free: ask for less" in capsys.readouterr().err
    fits, large = shapes.DecodeShape(1, 1, 1, 2**20), shapes.DecodeShape(8, 1, 1, 2**20)
    assert bench.fitting([fits, large], 10**9, explicit=False) == [fits]
    assert "left out, too large for this memory: R 8 H 1 q 1 1M" in capsys.readouterr().out
    with pytest.raises(MemoryError, match="R 8 H 1"):
        bench.fitting([large], 10**9, explicit=False)
    assert bench.fitting([large], None, explicit=True) == [large]


def test_bench_table_is_that_of_the_docs():
    options = bench.argparse.Namespace(table=True, call="all")
    assert tuple(map(tuple, bench.wanted(options))) == (shapes.DECODE, shapes.PREFILL)


def test_device_time_of_a_trace(monkeypatch):
    """Two calls of two kernels a replay, 3 and 1 us inside, 1 us apart; the first replay is slower and left out."""
    events = []
    for replay, extra in enumerate((500.0, 0.0, 0.0)):
        for call in range(2):
            start = replay * 1e6 + call * 6000
            events += [("m3_score", start, start + 3000 + extra), ("m3_select", start + 4000, start + 5000)]
    monkeypatch.setattr(profiling, "_kernel_events", lambda folder: events)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    time = profiling.device_time(lambda: jax.numpy.zeros(()), calls=2, replays=3)
    assert time == profiling.DeviceTime(span=5.5, kernels={"m3_score": 3.0, "m3_select": 1.0})
    assert rows.part(time, "score") == 3.0
    assert rows.part(time, "merge") is None


def test_device_time_of_an_unknown_trace_is_by_the_host(monkeypatch):
    monkeypatch.setattr(profiling, "_kernel_events", lambda folder: [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert profiling.device_time(lambda: jax.numpy.zeros(()), calls=1).method == profiling.HOST_CLOCK


def test_a_kernel_that_cannot_serve_says_why_in_the_choice(monkeypatch):
    monkeypatch.setattr(environment, "lowering_platform", lambda: "tpu")
    case = Prefill(query_lens=(2,), prefix_lens=(0,), heads=9)

    def call(**options):
        return check.calls.prefill(case, **options)

    chosen = environment.choice(call)
    assert chosen.implementation == "xla"
    assert "9 heads are above 8" in chosen.reason
    assert environment.choices()["decode"] == environment.Choice("pallas_mosaic_tpu", "kernels for tpu")
