"""Rows of `bench` on the CPU: peers and the XLA way beside this library, and what fails of them."""

import types

import jax
import numpy as np
import pytest

from m3_pallas.measure import environment, profiling, report, rows, shapes, xla_way

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="expects what a CPU answers")


@pytest.fixture(autouse=True)
def short_chains(monkeypatch):
    monkeypatch.setattr(profiling, "HOST_CHAIN_SECONDS", 0.01)


RIGHT = np.array([[[1, 0, *[-1] * 14]]], np.int32)


def test_a_peer_that_fails_leaves_the_others():
    class Peers:
        def decode(self, variant, queries, arrays, statics):
            if variant == "amd gfx950":
                raise TypeError("no such launch")
            method = profiling.GRAPH if variant == "amd" else profiling.HOST_CLOCK
            return profiling.DeviceTime(8.0, {}, method), RIGHT

    shape = shapes.DecodeShape(1, 1, 1, 256)
    row = rows.decode_row(shape, None, profiling.Ceiling(1.0, profiling.HOST_CLOCK), Peers(), None)
    assert row["peers_us"] == {"amd": 8.0, "common": 8.0}
    assert row["peer_errors"] == {"amd gfx950": "TypeError: no such launch"}
    # Device time is not compared with the host's clock: the ratio is that of "common".
    assert row["best_peer_over_ours"] == pytest.approx(8.0 / row["call_us"])
    assert row["peer_methods"] == {"amd": profiling.GRAPH, "common": profiling.HOST_CLOCK}
    assert "vLLM amd by graph replay" in report.decode_line(row)


def test_a_peer_with_other_answers_gets_no_ratio():
    class Peers:
        def decode(self, variant, queries, arrays, statics):
            ids = np.zeros_like(RIGHT) if variant == "amd" else RIGHT
            return profiling.DeviceTime(8.0 if variant == "common" else 1.0, {}, profiling.HOST_CLOCK), ids

    shape = shapes.DecodeShape(1, 1, 1, 256)
    row = rows.decode_row(shape, None, profiling.Ceiling(1.0, profiling.HOST_CLOCK), Peers(), None)
    assert row["ids_equal"] == {"amd": 1 / 16, "amd gfx950": 1.0, "common": 1.0}  # "amd" says 0 sixteen times
    assert row["peer_errors"] == {"amd": "6.2% of the ids are equal"}
    assert row["peers_us"] == {"amd gfx950": 1.0, "common": 8.0}


def test_peers_of_a_prefill_row():
    class Peers:
        def prefill(self, variant, queries, arrays, statics, topk):
            if variant == "common":
                raise TypeError("no such launch")
            assert (statics, topk) == ((4, 132, 1), (16, 0, 1))
            times = [profiling.DeviceTime(us, {}, profiling.HOST_CLOCK) for us in (8.0, 2.0)]
            return *times, np.tile(RIGHT, (1, 4, 1))

    row = rows.prefill_row(
        shapes.PrefillShape(1, 4, 128), None, profiling.Ceiling(1.0, profiling.HOST_CLOCK), Peers(), 0
    )  # fmt: skip
    assert row["peers_us"] == {"amd": {"score": 8.0, "selection": 2.0}}
    assert row["ids_equal"] == {"amd": 1.0}
    assert row["peer_errors"] == {"common": "TypeError: no such launch"}
    assert row["best_peer_over_ours_score"] == pytest.approx(8.0 / row["score_us"])
    assert row["best_peer_over_ours_selection"] == pytest.approx(2.0 / row["selection_us"])
    assert "xla_way_us" not in row  # it does not fit in no memory
    # The ids shown are those of the variants that got a ratio.
    line = report.prefill_line(row | {"ids_equal": {"amd": 1.0, "common": 0.06}})
    assert "100.0%" in line
    assert "6.0%" not in line


@pytest.mark.parametrize(
    ("theirs", "share"),
    [([3, 1, 2, -1], 1.0), ([4, 1, 2, -1], 0.75), ([1, 2, -1, -1], 0.75), ([0, 1, 2, 3], 0.75), ([-1] * 4, 0.25)],
)
def test_share_of_equal_ids(theirs, share):
    assert rows.same_ids(np.array([[theirs]]), np.array([[[1, 2, 3, -1]]])) == share


def test_an_xla_way_that_fails_leaves_the_row(monkeypatch):
    def fails(*arrays, **statics):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(xla_way, "decode", fails)
    monkeypatch.setattr(xla_way, "prefill", fails)
    ceiling = profiling.Ceiling(1.0, profiling.HOST_CLOCK)
    decode = rows.decode_row(shapes.DecodeShape(1, 1, 1, 256), None, ceiling, None, None)
    prefill = rows.prefill_row(shapes.PrefillShape(1, 4, 128), None, ceiling, None, None)
    for row, line in ((decode, report.decode_line), (prefill, report.prefill_line)):
        assert row["xla_way_error"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
        assert "xla_way_us" not in row
        assert "XLA way: RuntimeError" in line(row)


def test_the_best_peer_is_shown():
    row = {
        "shape": "R 1", "score_us": 1.0, "selection_us": 1.0, "call_us": 2.0, "gb_per_s": 1.0, "share_of_ceiling": 0.5,
        "peers_us": {"amd": 9.0, "common": 4.0}, "ids_equal": {"amd": 0.995, "common": 1.0}, "best_peer_over_ours": 2.0,
    }  # fmt: skip
    assert "4.0 common       2.00 100.0%" in report.decode_line(row)
    assert "| 9.0 | 4.0 | 2.00 |" in report.markdown({"decode": [row]})


def test_a_chain_makes_distinct_calls(monkeypatch):
    """XLA would merge equal ones."""
    seen = []

    def device_time(function, *arguments, calls):
        text = function.lower(*arguments).as_text()
        seen.append((text.count("stablehlo.sine"), calls))

    monkeypatch.setattr(rows, "device_time", device_time)
    queries, *_ = shapes.decode_arrays(shapes.DecodeShape(1, 1, 1, 128), 3)
    rows.chain_time(lambda query, other: jax.numpy.sin(query) + other, tuple(queries), 1.0)
    assert seen == [(3, 3)]
    assert len({query.tobytes() for query in np.asarray(queries)}) == 3


def test_memory_of_the_xla_way():
    """Cache and gathered keys of 4 MiB; 2 * 2 * 4 products of 8192 tokens in float32, twice."""
    assert shapes.DecodeShape(2, 4, 2, 8192).gathered == 2 * 2 * 8192 * 256 + 2 * 4 * 2 * 2 * 4 * 8192


@pytest.mark.parametrize(
    ("version", "platform"), [("PJRT C API\nrocm 60300", "rocm"), ("PJRT C API cuda 13000", "cuda")]
)
def test_the_platform_of_a_gpu(monkeypatch, version, platform):
    device = types.SimpleNamespace(
        client=types.SimpleNamespace(platform_version=version),
        memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 200},
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert environment.lowering_platform() == platform
    assert environment.memory_bytes() == 640  # four fifths of what is free
