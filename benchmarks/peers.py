"""vLLM's MiniMax-M3 indexer kernels as peers, loaded from its sources without installing vLLM. Needs PyTorch.

The folder holds `vllm/models/minimax_m3/{amd,common}/ops/*.py` of vLLM 0.32.0. What those files import from the rest
of vLLM is stubbed. "amd" runs with the policy of a generic AMD GPU, "amd gfx950" with the gfx950 one, "common" is
vLLM's path for NVIDIA.
"""

from __future__ import annotations

import importlib.util
import pathlib
import statistics
import sys
import types
from typing import Any

VARIANTS = ("amd", "amd gfx950", "common")


class Peers:
    """vLLM's kernels on the arrays of JAX, shared through DLPack."""

    def __init__(self, folder: pathlib.Path):
        import torch
        import triton
        import triton.language as tl

        self.torch = torch
        self.gfx950 = False
        torch.no_grad().__enter__()
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
        platform = types.SimpleNamespace(
            is_rocm=lambda: self.gfx950,
            is_cuda=lambda: not self.gfx950,
            is_arch_support_pdl=lambda: False,
            is_device_capability=lambda capability: False,
        )
        stubs = {
            "vllm": {},
            "vllm.platforms": {"current_platform": platform},
            "vllm.platforms.rocm": {"on_gfx950": lambda: self.gfx950},
            "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
            "vllm.utils": {},
            "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y, "cdiv": lambda x, y: -(-x // y)},
            **{f"vllm.models{suffix}": {} for suffix in ("", ".minimax_m3", ".minimax_m3.amd", ".minimax_m3.common")},
            "vllm.models.minimax_m3.amd.ops": {},
            "vllm.models.minimax_m3.common.ops": {},
        }
        for name, members in stubs.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            module.__path__ = []
            sys.modules[name] = module
        ops = folder / "vllm" / "models" / "minimax_m3"
        for name in ("common.ops.sparse_attn", "amd.ops.sparse_pa", "amd.ops.index_topk", "common.ops.index_topk"):
            full = f"vllm.models.minimax_m3.{name}"
            spec = importlib.util.spec_from_file_location(full, ops / (name.replace(".", "/") + ".py"))
            module = importlib.util.module_from_spec(spec)
            sys.modules[full] = module
            spec.loader.exec_module(module)
        self.modules = {
            "amd": sys.modules["vllm.models.minimax_m3.amd.ops.index_topk"],
            "amd gfx950": sys.modules["vllm.models.minimax_m3.amd.ops.index_topk"],
            "common": sys.modules["vllm.models.minimax_m3.common.ops.index_topk"],
        }

    def versions(self) -> dict[str, str]:
        import torch
        import triton

        return {"vllm": "0.32.0", "torch": torch.__version__, "triton": triton.__version__}

    def decode(self, variant: str, queries: Any, arrays: tuple, statics: tuple) -> tuple[float, Any]:
        """Microseconds a call of a CUDA graph of one call for each of `queries`, and the first call's ids."""
        self.gfx950 = variant == "amd gfx950"
        function = self.modules[variant].minimax_m3_index_decode
        queries = list(self.torch.from_dlpack(queries).unbind(0))
        rest = [self.torch.from_dlpack(array) for array in arrays]
        ids = function(queries[0], *rest, *statics).clone()
        time = self._graph_time([lambda q=q: function(q, *rest, *statics) for q in queries])
        return time, ids.cpu().numpy()

    def prefill(
        self, variant: str, queries: Any, arrays: tuple, statics: tuple, topk: tuple
    ) -> tuple[float, float, Any]:
        """Microseconds of a score and of a selection call, and the last call's ids."""
        self.gfx950 = variant == "amd gfx950"
        module = self.modules[variant]
        queries = list(self.torch.from_dlpack(queries).unbind(0))
        rest = [self.torch.from_dlpack(array) for array in arrays]
        _, _, starts, _, prefix = rest
        score_time = self._graph_time([lambda q=q: module.minimax_m3_index_score(q, *rest, *statics) for q in queries])
        scores = [module.minimax_m3_index_score(q, *rest, *statics) for q in queries]
        select = module.minimax_m3_index_topk
        select_time = self._graph_time([lambda s=s: select(s, starts, prefix, statics[0], *topk) for s in scores])
        return score_time, select_time, select(scores[-1], starts, prefix, statics[0], *topk).cpu().numpy()

    def _graph_time(self, calls: list) -> float:
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls[:3]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            keep = [call() for call in calls]
        times = []
        for i in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i:
                times.append(start.elapsed_time(end) * 1e3 / len(calls))
        del keep
        return statistics.median(times)
