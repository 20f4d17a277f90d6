"""Device time out of a trace, made up here: nothing is profiled."""

import types

import jax
import pytest

from m3_pallas.measure import environment, profiling, rows

REPLAYS = profiling.REPLAYS


def event(name, start, end):
    return types.SimpleNamespace(name=name, start_ns=start, duration_ns=end - start)


def events_of(calls=2, kernels=("m3_score", "m3_select"), before=()):
    """Of calls of kernels of 3 and 1 us, 1 us apart. The later a replay, the slower; the first is slowest."""
    events = []
    for replay in range(REPLAYS):
        start = replay * 1e6
        for name in before:
            events.append(event(name, start - 9000, start - 8000))
        for call in range(calls):
            slow = 5000.0 if replay == 0 else 100.0 * replay
            events.append(event(kernels[0], start + call * 6000, start + call * 6000 + 3000))
            if len(kernels) > 1:
                events.append(event(kernels[1], start + call * 6000 + 4000, start + call * 6000 + 5000))
        events[-1].duration_ns += slow
    return events


def planes(events, device="/device:GPU:0", line="Stream #1"):
    """As a profiler lays them out: the host, a second device, and other lines, none of which count."""
    others = [types.SimpleNamespace(name=name, events=events[:3]) for name in ("XLA Modules", "Async XLA Ops", "Steps")]
    own = types.SimpleNamespace(name=line, events=events)
    host = types.SimpleNamespace(name="/host:CPU", lines=[own])
    second = types.SimpleNamespace(name=device.replace("0", "1"), lines=[own])
    return [host, second, types.SimpleNamespace(name=device, lines=[*others, own])]


def timed(monkeypatch, *traces, calls=2, platform="cuda", function=lambda: jax.numpy.zeros(())):
    """`device_time` of a chain whose traces are these, one after the other."""
    left = list(traces)
    monkeypatch.setattr(profiling, "_kernel_events", lambda folder: profiling.device_events(left.pop(0)))
    monkeypatch.setattr(profiling, "HOST_CHAIN_SECONDS", 0.01)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if platform in ("cuda", "rocm") else platform)
    monkeypatch.setattr(environment, "lowering_platform", lambda: platform)
    return profiling.device_time(function, calls=calls)


@pytest.mark.parametrize(
    ("platform", "device", "line"),
    [("cuda", "/device:GPU:0", "Stream #13(Compute)"), ("tpu", "/device:TPU:0", "XLA Ops")],
)
def test_device_time_of_a_trace(monkeypatch, platform, device, line):
    """The median of six replays, whose last kernels take 0.1 to 0.6 us more; the first is left out."""
    time = timed(monkeypatch, planes(events_of(), device, line), platform=platform)
    assert time == profiling.DeviceTime(span=5.675, kernels={"m3_score": 3.0, "m3_select": 1.175})
    assert time.method == profiling.PROFILER
    assert rows.part(time, "score") == 3.0
    assert rows.part(time, "merge") is None


def test_what_prepares_a_chain_is_left_out(monkeypatch):
    """A fill before the first of several calls; with one call it belongs to that."""
    fill = ("loop_broadcast_fusion_3",)
    assert timed(monkeypatch, planes(events_of(before=fill))).span == 5.675
    one = timed(monkeypatch, planes(events_of(calls=1, before=fill)), calls=1)
    assert one.span == pytest.approx(9 + 5.35)
    numbered = events_of(kernels=("m3_score", "copy"))
    for i, each in enumerate(numbered):
        each.name += f"_{i % 4}"  # XLA's names of one kernel differ by a number
    assert timed(monkeypatch, planes(numbered)).span == 5.675
    other = events_of()
    for each in other[3::4]:
        each.name = "m3_select_wide"  # a call's own kernel, though not every call's
    assert timed(monkeypatch, planes(other)).span == 5.675


def test_a_disturbed_trace_is_taken_again(monkeypatch):
    disturbed = planes([*events_of(), event("memset", 5.0, 6.0)])
    others = events_of()
    others[5].name = "memset"  # as many events as expected, but other ones
    assert timed(monkeypatch, disturbed, planes(others), planes(events_of())).method == profiling.PROFILER
    assert timed(monkeypatch, *[disturbed] * 3, planes(events_of())).method == profiling.LAUNCHED
    assert timed(monkeypatch, *[disturbed] * 6).method == profiling.HOST_CLOCK
    assert timed(monkeypatch, *[[]] * 6).method == profiling.HOST_CLOCK


def test_a_command_buffer_of_which_the_profiler_sees_one_kernel(monkeypatch):
    one_kernel = planes(events_of(calls=1, kernels=("m3_score",)))
    whole = planes(events_of())
    # Fewer kernels than calls are noticed anywhere.
    assert timed(monkeypatch, *[one_kernel] * 3, whole).method == profiling.LAUNCHED
    # One call of several kernels: on ROCm, where this is known to happen, both ways are compared.
    launched = planes(events_of(calls=1))
    assert timed(monkeypatch, one_kernel, launched, calls=1).kernels.keys() == {"m3_score"}
    time = timed(monkeypatch, one_kernel, planes(events_of(calls=3)), calls=1, platform="rocm")
    assert (time.method, time.kernels["m3_score"]) == (profiling.LAUNCHED, 9.0)
    assert timed(monkeypatch, whole, whole, platform="rocm").method == profiling.PROFILER


class Refused:
    """A jitted function that fails until it is compiled with options."""

    def __init__(self, monkeypatch, options=None):
        self.jit = jax.jit
        self.known = options or profiling.NO_COMMAND_BUFFER
        monkeypatch.setattr(profiling, "NO_COMMAND_BUFFER", self.known)
        monkeypatch.setattr(jax, "jit", lambda function, **options: self.jit(lambda: jax.numpy.ones(()), **options))

    def __call__(self):
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_NOT_SUPPORTED")


def test_a_chain_that_is_no_command_buffer_is_launched(monkeypatch):
    time = timed(monkeypatch, planes(events_of()), function=Refused(monkeypatch))
    assert time == profiling.DeviceTime(5.675, {"m3_score": 3.0, "m3_select": 1.175}, profiling.LAUNCHED)
    # Its option reaches the compiler, which knows it: one that it does not know it refuses.
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        timed(monkeypatch, planes(events_of()), function=Refused(monkeypatch, {"xla_no_such_option": 1}))


def test_host_clock(monkeypatch):
    """A chain that takes 2 ms by a made-up clock, of four calls: 500 us each."""
    now = iter(range(10**6))
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(now) * 1e-3)
    monkeypatch.setattr(profiling, "HOST_CHAIN_SECONDS", 1e-3)
    time = profiling.device_time(jax.jit(lambda x: x + 1), 1.0, calls=4)
    assert (time.method, time.span) == (profiling.HOST_CLOCK, pytest.approx(250.0))


def test_ceilings(monkeypatch):
    spans = iter([4.0, 2.0, 8.0])
    monkeypatch.setattr(
        profiling, "device_time", lambda function, *arrays, calls: profiling.DeviceTime(next(spans) * calls, {})
    )
    # 1 MiB in 2 us, the better of two reductions, is 524 GB/s; 2 * 128**3 FLOPs in 8 us are half a TFLOP/s.
    assert profiling.read_ceiling(1 << 20) == (pytest.approx(2**20 / 2e3), profiling.PROFILER)
    assert profiling.matrix_ceiling(128) == (pytest.approx(2 * 128**3 / 8e6), profiling.PROFILER)


def test_clocks_are_not_mixed():
    device = profiling.DeviceTime(8.0, {}, profiling.GRAPH)
    assert device.over(profiling.DeviceTime(4.0, {})) == 2.0
    assert device.over(profiling.DeviceTime(4.0, {}, profiling.LAUNCHED)) == 2.0
    assert device.over(profiling.DeviceTime(4.0, {}, profiling.HOST_CLOCK)) is None
