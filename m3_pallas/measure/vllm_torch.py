"""vLLM's kernels through PyTorch, on JAX's arrays by DLPack, as CUDA graphs in the trace of JAX's profiler."""

from __future__ import annotations

import inspect
import pathlib
import statistics
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import triton

from m3_pallas.measure.profiling import GRAPH, DeviceTime, traced
from m3_pallas.measure.vllm import Sources


def make(root: pathlib.Path) -> TorchPeers:
    if not torch.cuda.is_available():
        raise NotImplementedError("this PyTorch sees no GPU")
    return TorchPeers(root)


class TorchPeers:
    """See `vllm.Peers`."""

    name = "PyTorch"

    def __init__(self, root: pathlib.Path):
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
        capability = None if torch.version.hip else torch.cuda.get_device_capability()
        self.sources = Sources(root, torch, capability=capability, pdl=True)

    def versions(self) -> dict[str, str]:
        return self.sources.versions() | {"torch": torch.__version__, "triton": triton.__version__}

    def decode(self, variant: str, queries: Any, arrays: tuple, statics: tuple) -> tuple[DeviceTime, np.ndarray]:
        with self.sources.stubs(), torch.no_grad():
            function = self.sources.module(variant).minimax_m3_index_decode
            each = list(torch.from_dlpack(queries).unbind(0))
            rest = [torch.from_dlpack(array) for array in arrays]
            options = {}
            if "completion_counter" in inspect.signature(function).parameters:  # vLLM keeps one, zeroed once
                tokens, heads, _ = each[0].shape
                options["completion_counter"] = torch.zeros((heads, tokens), dtype=torch.int32, device=each[0].device)
            ids = function(each[0], *rest, *statics, **options).clone()
            time = graph_time([lambda q=q: function(q, *rest, *statics, **options) for q in each])
        return time, ids.cpu().numpy()

    def prefill(
        self, variant: str, queries: Any, arrays: tuple, statics: tuple, topk: tuple
    ) -> tuple[DeviceTime, DeviceTime, np.ndarray]:
        with self.sources.stubs(), torch.no_grad():
            module = self.sources.module(variant)
            each = list(torch.from_dlpack(queries).unbind(0))
            rest = [torch.from_dlpack(array) for array in arrays]
            _, _, starts, _, prefix = rest
            score, select = module.minimax_m3_index_score, module.minimax_m3_index_topk
            score_time = graph_time([lambda q=q: score(q, *rest, *statics) for q in each])
            scores = [score(q, *rest, *statics) for q in each]
            select_time = graph_time([lambda s=s: select(s, starts, prefix, statics[0], *topk) for s in scores])
            ids = select(scores[-1], starts, prefix, statics[0], *topk)
        return score_time, select_time, ids.cpu().numpy()


def graph_time(calls: list) -> DeviceTime:
    """Time of a call in a replayed CUDA graph of `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        keep = [call() for call in calls]

    def replay():
        graph.replay()
        torch.cuda.synchronize()

    time = traced(replay, len(calls)) or _between_events(graph, len(calls))
    del keep
    return time


def _between_events(graph: Any, calls: int) -> DeviceTime:
    """Where the trace does not show it. The replay before keeps the GPU busy while the host launches this one."""
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return DeviceTime(statistics.median(times[1:]), {}, GRAPH)
