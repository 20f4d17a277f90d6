"""`python -m m3_pallas check` and `bench`, on the CPU: small sizes, records, bad arguments, interruption."""

import json
import os

import jax
import pytest

import m3_pallas
from m3_pallas import implementations
from m3_pallas.__main__ import main
from m3_pallas.measure import bench, check, environment, output, profiling, report, rows, shapes
from m3_pallas.measure.calls import decode_oracle, prefill_oracle
from m3_pallas.measure.cases import CASES, Prefill, decode_inputs, golden, prefill_inputs

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="expects what a CPU answers")
DESCRIPTION = {
    "date", "device", "platform", "architecture", "m3_pallas", "jax", "jaxlib", "python", "platform_version",
    "xla_flags", "implementations",
}  # fmt: skip
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
    assert record.keys() == DESCRIPTION | {"cases", "failed", "asked_for", "interrupted"}
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


def test_check_tells_what_is_not_served_from_what_fails(few_cases, capsys, monkeypatch):
    assert main(["check", "--implementation", "pallas_mosaic_tpu"]) == 1  # it serves none
    out = capsys.readouterr().out
    assert out.count("not served: minimax_m3_index") == 3
    assert "runs on tpu only" in out
    assert "0 of 0 cases equal the oracle on cpu, 3 not served" in out

    right = m3_pallas.minimax_m3_index_decode

    def decode(idx_q, *arrays, **options):
        if len(idx_q) == 5:
            raise refusal
        return right(idx_q, *arrays, **options)

    monkeypatch.setattr(m3_pallas, "minimax_m3_index_decode", decode)
    refusal = implementations.NotServedError("five rows; use None or 'xla'")
    assert main(["check", "--implementation", "xla"]) == 0
    assert "2 of 2 cases equal the oracle on cpu, 1 not served" in capsys.readouterr().out
    # Only a refusal of an implementation that was asked for; JAX says the same of what it cannot lower.
    assert main(["check"]) == 1
    refusal = NotImplementedError("Unimplemented primitive in Pallas GPU lowering")
    for arguments in (["check"], ["check", "--implementation", "xla"]):
        assert main(arguments) == 1
        out = capsys.readouterr().out
        assert "  NotImplementedError: Unimplemented primitive" in out
        assert "2 of 3 cases equal" in out

    def broken(*arrays, **options):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(m3_pallas, "minimax_m3_index_decode", broken)
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert out.count("  RuntimeError: out of memory\n") == 2
    assert "1 of 3 cases equal" in out


def test_interrupted_check_keeps_its_outcomes(few_cases, tmp_path, capsys, monkeypatch):
    run_case = check.run_case

    def interrupt(name, *rest):
        if name == "tiny M3, decode":
            raise KeyboardInterrupt
        return run_case(name, *rest)

    monkeypatch.setattr(check, "run_case", interrupt)
    file = tmp_path / "check.json"
    assert main(["check", "--json", str(file)]) == 130
    assert "2 of 2 cases equal" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["interrupted"]
    assert [case["name"] for case in record["cases"]] == ["decode_table_stride8", "prefill_empty_request"]


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
    table, lens = (golden()[f"{name}/sparse_{part}"].copy() for part in ("block_table", "context_lens"))
    table[1, 3] += 1
    table[1, 4] += 1
    lens[2:] += 1
    wrong = m3_pallas.IndexDecodeResult(ids, table, lens, None)
    problems, _ = check.compare(name, case, inputs, wrong)
    assert problems == ["sparse_block_table: 1 of 5 rows differ", "sparse_context_lens: 3 of 5 rows differ"]


@pytest.fixture
def short_chains(monkeypatch):
    monkeypatch.setattr(profiling, "HOST_CHAIN_SECONDS", 0.01)
    for name, value in (("read_ceiling", 4.0), ("matrix_ceiling", 2.0)):
        monkeypatch.setattr(profiling, name, lambda size, value=value: profiling.Ceiling(value, profiling.HOST_CLOCK))


def test_bench(short_chains, tmp_path, capsys):
    json_file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*SMALL, "--json", str(json_file), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert out.count("  (host clock)\n") == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(json_file.read_text())
    assert record.keys() == DESCRIPTION | {
        "topk", "asked_for", "decode", "prefill", "interrupted", "geometric_means", "read_ceiling_gb_per_s",
        "read_ceiling_method", "matrix_ceiling_tflop_per_s", "matrix_ceiling_method",
    }  # fmt: skip
    assert record["read_ceiling_method"] == profiling.HOST_CLOCK
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
    assert prefill["xla_way_over_ours"] == pytest.approx(prefill["xla_way_us"] / prefill["combined_us"])
    assert decode["implementation"] == "xla"
    assert prefill["implementation"] == {"score": "xla", "selection": "xla"}
    assert record["geometric_means"] == {
        f"{call} xla_way_over_ours": pytest.approx(row["xla_way_over_ours"])
        for call, row in (("decode", decode), ("prefill", prefill))
    }
    assert not record["interrupted"]
    assert "| R 2 H 1 q 1 1K | - | - |" in report.markdown(record)


ROW = {"score_us": None, "selection_us": None, "call_us": 2.0, "gb_per_s": 1.0, "share_of_ceiling": 0.5}


def decode_rows(monkeypatch, *outcomes):
    """`rows.decode_row` returns a row or raises, in this order."""
    left = list(outcomes)

    def row(shape, **options):
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome | {"shape": str(shape)}

    monkeypatch.setattr(rows, "decode_row", row)


BATCHES = ["bench", "--call", "decode", "--heads", "1", "--contexts", "1K", "--requests"]


def test_a_failing_ceiling_leaves_the_rows(short_chains, tmp_path, capsys, monkeypatch):
    def fails(size):
        raise MemoryError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(profiling, "read_ceiling", fails)
    file, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*BATCHES, "1", "--json", str(file), "--plot", str(plot)]) == 0
    assert "no read ceiling: MemoryError: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["read_ceiling_error"] == "MemoryError: RESOURCE_EXHAUSTED"
    assert record["decode"][0]["share_of_ceiling"] is None
    assert record["decode"][0]["gb_per_s"] > 0
    assert not plot.exists()  # there is no share to draw


def test_a_combined_call_that_differs_is_a_failure(short_chains, monkeypatch, capsys):
    def row(shape, **options):
        return right(shape, **options) | {"combined_equal": False}

    right = rows.prefill_row
    monkeypatch.setattr(rows, "prefill_row", row)
    assert main(["bench", "--call", "prefill", "--heads", "1", "--contexts", "256", "--tokens", "128"]) == 1
    assert "combined call DIFFERS" in capsys.readouterr().out


def test_interrupted_bench_keeps_its_rows(short_chains, tmp_path, capsys, monkeypatch):
    file = tmp_path / "bench.json"
    decode_rows(monkeypatch, ROW, KeyboardInterrupt())
    assert main([*BATCHES, "1,2", "--json", str(file)]) == 130
    assert "interrupted: 1 rows are finished" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["interrupted"]
    assert [row["shape"] for row in record["decode"]] == ["R 1 H 1 q 1 1K"]
    # Interrupted before the first row, it leaves the earlier record alone.
    decode_rows(monkeypatch, KeyboardInterrupt())
    assert main([*BATCHES, "4", "--json", str(file)]) == 130
    assert json.loads(file.read_text()) == record
    assert list(tmp_path.iterdir()) == [file]


def test_a_row_that_fails_leaves_the_others(short_chains, tmp_path, capsys, monkeypatch):
    file = tmp_path / "bench.json"
    decode_rows(monkeypatch, ROW, RuntimeError("RESOURCE_EXHAUSTED: no memory\nmore"), ROW)
    assert main([*BATCHES, "1,2,4", "--json", str(file)]) == 1
    assert "R 2 H 1 q 1 1K          RuntimeError: RESOURCE_EXHAUSTED: no memory\n" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert ["error" in row for row in record["decode"]] == [False, True, False]
    assert report.markdown(record).count("\n| R ") == 2


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--table", "--heads", "1", "--query-len", "2"], "--table has its own shapes; leave out --heads, --query-len"),
        (
            ["--call", "prefill", "--contexts", "1K", "--tokens", "8K"],
            "no context of (1024,) holds a chunk of --tokens",
        ),
        (["--json", "missing/bench.json"], "cannot write missing/bench.json: its folder does not exist"),
        (["--plot", "missing/bench.png"], "cannot write missing/bench.png: its folder does not exist"),
        (["--json", "folder"], "cannot write folder: it is not a regular file"),
        (["--json", ""], "cannot write .: it is not a regular file"),
        (["--plot", "x.png", "--json", "x.png"], "--plot and --json are both x.png"),
        (["--plot", "bench.xyz"], "--plot must end in one of .png, .pdf, .svg, got bench.xyz"),
        (["--vllm", "missing"], "missing holds no MiniMax-M3 indexer of vLLM"),
        (["--implementation", "pallas_triton"], "--implementation pallas_triton runs on cuda, rocm, not cpu"),
    ],
)
def test_what_cannot_start_says_so_before_measuring(arguments, problem, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["bench", *arguments]) == 2
    assert f"m3_pallas bench: {problem}" in capsys.readouterr().err


def test_a_record_goes_where_a_link_points_and_never_over_a_device(tmp_path, capsys):
    link, file, fifo = tmp_path / "link.json", tmp_path / "file.json", tmp_path / "fifo.json"
    link.symlink_to(file)
    output.check_file(link)
    output.write_json(link, {"rows": 1})
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"rows": 1}
    os.mkfifo(fifo)
    assert main(["check", "--json", str(fifo)]) == 2
    assert "fifo.json: it is not a regular file" in capsys.readouterr().err
    assert fifo.is_fifo()


def test_too_little_memory(capsys, monkeypatch):
    monkeypatch.setattr(environment, "memory_bytes", lambda: 10**9)
    assert main(["bench", "--requests", "64", "--contexts", "1M", "--heads", "1"]) == 2
    assert "R 64 H 1 q 1 1M needs 51.5 GB and 1.0 GB may be used: ask for less" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_only_if_it_was_asked_for(capsys):
    few, many, long = (shapes.DecodeShape(r, 1, 1, n) for r, n in ((1, 2**13), (8, 2**13), (8, 2**20)))
    memory = 10**9
    options = bench.argparse.Namespace(requests=None, contexts=None)

    def fitting(wanted, memory=memory):
        return bench.fitting(wanted, memory, bench.named(options, requests="requests", contexts="context"))

    assert fitting([few, many, long]) == [few, many]
    assert "left out, too large for this memory: R 8 H 1 q 1 1M" in capsys.readouterr().out
    with pytest.raises(MemoryError, match=r"R 8 H 1 q 1 1M needs 6\.4 GB and 1\.0 GB may be used"):
        fitting([long])
    options.requests = (1, 8)  # their contexts are defaults: what fits will do
    assert fitting([few, many, long]) == [few, many]
    options.contexts = (2**13, 2**20)  # 8 requests of 1M tokens were asked for
    with pytest.raises(MemoryError, match="R 8 H 1 q 1 1M"):
        fitting([few, many, long])
    assert fitting([few, many, long], None) == [few, many, long]


def test_memory_of_a_prefill_shape():
    """Keys of 2 KiB tokens of 256 bytes three times; scores of 16 blocks for twelve calls of 2 * 512 rows."""
    assert shapes.PrefillShape(2, 512, 1536).needed == 3 * 2048 * 256 + 12 * 2 * 512 * 16 * 4


def test_a_kernel_that_cannot_serve_says_why_in_the_choice(monkeypatch):
    monkeypatch.setattr(environment, "lowering_platform", lambda: "tpu")
    case = Prefill(query_lens=(2,), prefix_lens=(0,), heads=9)

    def call(**options):
        return check.calls.prefill(case, **options)

    chosen = environment.choice(call)
    assert chosen.implementation == "xla"
    assert "9 heads are above 8" in chosen.reason
    # Its scores are XLA's, its selection is the kernel's.
    assert check.chosen_for(case, prefill_inputs(case)) == "xla, pallas_mosaic_tpu"
    assert environment.choices()["decode"] == environment.Choice("pallas_mosaic_tpu", "kernels for tpu")
