"""The committed records of measurements: the tables of docs/performance.md are theirs, row by row."""

import argparse
import json
import pathlib
import re

import pytest

from m3_pallas.measure import bench, check, report

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = [f"{call}_h200_{through}" for call in ("decode", "prefill") for through in ("jax_triton", "pytorch")]
SHOWN = {"decode_h200_jax_triton": "Decode", "prefill_h200_pytorch": "Prefill"}  # by the section's title


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SHOWN)
def test_the_docs_show_the_record(name):
    text = (ROOT / "docs" / "performance.md").read_text()
    [section] = [part for part in text.split("\n## ") if part.startswith(f"{SHOWN[name]} on an H200: measured")]
    table = report.markdown(read(name)).splitlines()
    shown = re.findall(r"^\|.*$", section, re.M)
    assert shown == table
    assert f"benchmarks/results/{name}.json" in section


def test_the_docs_show_the_portable_record():
    text = (ROOT / "docs" / "performance.md").read_text()
    rows = read("portable_cpu")["rows"]
    lines = [f"| {r['shape']} | {r['xla_ms']:.2f} | {r['usual_ms']:.2f} | {r['ratio']:.2f} |" for r in rows]
    assert "\n".join(lines) in text
    assert len(lines) == 7


@pytest.mark.parametrize("name", [*TABLES, "grid_h200"])
def test_a_record_is_whole(name):
    """Every shape of the table, or more, without errors; what peers there are gave our ids."""
    record = read(name)
    assert not record["interrupted"]
    done = record["decode"] + record["prefill"]
    assert not [row for row in done if "error" in row or row.get("peer_errors")]
    assert record["geometric_means"] == pytest.approx(report.geometric_means(record))
    if name.startswith("grid"):
        assert (len(record["decode"]), len(record["prefill"])) == (33, 18)
        return
    options = argparse.Namespace(table=True, requests=None, heads=None, contexts=None, tokens=None, query_len=1)
    options.call = name.split("_")[0]
    decode, prefill = bench.wanted(options)
    assert [row["shape"] for row in done] == [str(shape) for shape in decode + prefill]
    assert min(share for row in done for share in row["ids_equal"].values()) > 0.99999


def test_the_check_agreed():
    record = read("check_h200")
    assert record["failed"] == 0
    assert len(record["cases"]) == len(check.all_cases())
    assert not [case for case in record["cases"] if case["problem"] or case["not_served"] or not case["rows"]]


def test_a_plot_has_a_line_for_each_batch_and_heads():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    _, ax = pyplot.subplots()
    report._plot_decode(read("grid_h200")["decode"], ax)
    drawn = [line for line in ax.get_lines() if len(line.get_xdata()) > 2]
    assert len(drawn) == 3 * 3  # 256 requests of 1M tokens did not fit: two points
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 9
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "R 1", "R 16", "R 64", "R 256", "H 1", "H 2", "H 4",
    ]  # fmt: skip
    assert ax.get_ylim()[1] > 1
    pyplot.close()
