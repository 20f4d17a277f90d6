"""Device time out of a trace, made up here: nothing is profiled."""

import types

import jax

from m3_pallas.measure import profiling, rows


def event(name, start, end):
    return types.SimpleNamespace(name=name, start_ns=start, duration_ns=end - start)


def trace(replays):
    """Planes of a trace of two calls of two kernels a replay, 3 and 1 us inside, 1 us apart; the first is slower."""
    events = []
    for replay in range(replays):
        for call in range(2):
            start = replay * 1e6 + call * 6000
            slow = 500.0 if replay == 0 else 0.0
            events += [event("m3_score", start, start + 3000 + slow), event("m3_select", start + 4000, start + 5000)]
    lines = [types.SimpleNamespace(name=name, events=own) for name, own in (("Stream #1", events), ("XLA Ops", events))]
    host = types.SimpleNamespace(name="/host:CPU", lines=lines)
    return [host, types.SimpleNamespace(name="/device:GPU:1", lines=lines[:1]),
            types.SimpleNamespace(name="/device:GPU:0", lines=lines)]  # fmt: skip


def timed(monkeypatch, *traces):
    """`device_time` of three replays whose traces are these, one after the other."""
    left = list(traces)
    monkeypatch.setattr(profiling, "_kernel_events", lambda folder: profiling.device_events(left.pop(0)))
    monkeypatch.setattr(profiling, "HOST_CHAIN_SECONDS", 0.01)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return profiling.device_time(lambda: jax.numpy.zeros(()), calls=2, replays=3)


def test_device_time_of_a_trace(monkeypatch):
    time = timed(monkeypatch, trace(3))
    assert time == profiling.DeviceTime(span=5.5, kernels={"m3_score": 3.0, "m3_select": 1.0})
    assert rows.part(time, "score") == 3.0
    assert rows.part(time, "merge") is None


def test_a_disturbed_trace_is_taken_again(monkeypatch):
    disturbed, other = trace(3), trace(3)
    disturbed[-1].lines[0].events.append(event("memset", 5.0, 6.0))
    other[-1].lines[0].events[5].name = "memset"  # as many events as expected, but other ones
    assert timed(monkeypatch, disturbed, other, trace(3)).method == profiling.PROFILER
    assert timed(monkeypatch, disturbed, other, disturbed).method == profiling.HOST_CLOCK
    assert timed(monkeypatch, [], [], []).method == profiling.HOST_CLOCK
