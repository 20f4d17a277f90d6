"""Loading vLLM's kernels: what is found, what is refused, and its Python code run on stand-ins for tensors."""

import contextlib
import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3_pallas.measure import environment, profiling, vllm

pytest.importorskip("triton")

INDEX_TOPK = """
import types

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import round_up


class _Kernel:
    params = [types.SimpleNamespace(do_not_specialize=i == 7) for i in range(9)]

    def __getitem__(self, grid):
        raise AssertionError("launched without its stand-in")


_fused_kernel = _Kernel()


@torch.no_grad()
def minimax_m3_index_decode(idx_q: torch.Tensor, pages, table, seq_lens: torch.Tensor | None, *statics):
    rocm = 1 if current_platform.is_rocm() else 0
    if rocm:
        from vllm.platforms.rocm import on_gfx950

        rocm += on_gfx950()
    assert idx_q.dtype == torch.bfloat16 and idx_q.dim() == 3
    score = torch.empty((idx_q.shape[0], round_up(3, 16)), dtype=torch.float32, device=idx_q.device)
    ids = torch.empty(idx_q.shape[1], idx_q.shape[0], statics[1], dtype=torch.int32, device=idx_q.device)
    strides = idx_q.stride(0), ids.stride(-1)
    _fused_kernel[(7, 2)](idx_q, score, ids, ids, seq_lens, seq_lens, *strides, rocm, BLOCK=128, num_warps=2)
    return ids
"""


TORCH = types.SimpleNamespace(Tensor=object, no_grad=lambda: lambda function: function)


@pytest.fixture
def tree(tmp_path):
    ops = tmp_path / "vllm" / "models" / "minimax_m3"
    for folder in ("amd", "common"):
        (ops / folder / "ops").mkdir(parents=True)
        (ops / folder / "ops" / "index_topk.py").write_text(INDEX_TOPK)
    (ops / "amd" / "ops" / "sparse_pa.py").write_text(
        "from vllm.models.minimax_m3.common.ops.sparse_attn import SIZE\n"
    )
    (ops / "common" / "ops" / "sparse_attn.py").write_text("SIZE = 128\n")
    return tmp_path


@pytest.fixture
def jax_triton(monkeypatch):
    """A stand-in whose kernel adds one to its last mutable array; it keeps the launches."""
    module = types.ModuleType("jax_triton")
    module.__version__ = "0"
    module.launches = []

    def triton_call(*arguments, kernel, out_type, grid, **options):
        module.launches.append((arguments, grid, options))
        ids = arguments[2]
        ids[...] = ids[...] + 1

    module.triton_call = triton_call
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    monkeypatch.delitem(sys.modules, "m3_pallas.measure.vllm_jax", raising=False)
    return module


def test_nothing_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no MiniMax-M3 indexer of vLLM: .*sparse_attn.py is missing"):
        vllm.find(str(tmp_path))
    if "vllm" not in sys.modules:
        with pytest.raises(FileNotFoundError, match="vllm is not installed; give the path of a checkout"):
            vllm.find("")


def test_nothing_to_run_it_with(tree, monkeypatch):
    for module in ("jax_triton", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("vllm_jax", "vllm_torch"):
        monkeypatch.delitem(sys.modules, f"m3_pallas.measure.{module}", raising=False)
    with pytest.raises(ImportError, match=r"need jax-triton .*vllm_jax: .*vllm_torch: "):
        vllm.peers(str(tree))


def test_a_jax_triton_that_cannot_gives_way(tree, jax_triton, monkeypatch):
    def refuse(*arguments, **options):
        raise TypeError("takes 2 positional arguments")

    jax_triton.triton_call = refuse
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "m3_pallas.measure.vllm_torch", raising=False)
    reason = "cannot run vLLM's kernels (TypeError: takes 2 positional arguments"
    with pytest.raises(ImportError, match=re.escape(reason)):
        vllm.peers(str(tree))
    assert sys.modules["torch"] is None
    torch = types.SimpleNamespace(make=lambda root: root)
    monkeypatch.setitem(sys.modules, "m3_pallas.measure.vllm_torch", torch)
    peers, [passed_over] = vllm.peers(str(tree))
    assert peers == tree
    assert reason in passed_over


@pytest.mark.parametrize(("variant", "policy"), [("amd", 0), ("amd gfx950", 2), ("common", 0)])
def test_calls_become_launches(tree, jax_triton, variant, policy):
    vllm_jax = importlib.import_module("m3_pallas.measure.vllm_jax")
    before = set(sys.modules)
    peers = vllm_jax.JaxTritonPeers(tree)
    run = peers.chain(variant, "minimax_m3_index_decode", (128, 4))
    queries = tuple(jnp.zeros((6, 2, 128), jnp.bfloat16) for _ in range(3))
    rest = (jnp.zeros((1, 128, 128), jnp.bfloat16), jnp.zeros((6, 1), jnp.int32), jnp.zeros(6, jnp.int32))
    ids = jax.jit(run)(queries, *rest)
    # The calls of a chain share what they allocate: three launches, three times one more.
    np.testing.assert_array_equal(ids, np.full((2, 6, 4), 3))
    assert len(jax_triton.launches) == 3
    arguments, grid, options = jax_triton.launches[0]
    assert grid == (7, 2)
    assert options == {"BLOCK": 128, "num_warps": 2}
    query, score, out, again, lens, lens_again, *numbers = arguments
    assert (query.shape, score.shape, out.shape, lens.shape) == ((6, 2, 128), (6, 16), (2, 6, 4), (6,))
    assert again.shape == (1,)  # a mutable array may be given once
    assert lens_again is lens
    folded = [vars(p).get("is_constexpr", False) for p in peers.sources.module(variant)._fused_kernel.kernel.params]
    assert folded == [False] * 6 + [True, False, True]  # integers, but for the one not to be specialized on
    assert numbers == [256, 1, policy]
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm")}


def test_what_was_measured_is_recorded(tree, jax_triton):
    peers = importlib.import_module("m3_pallas.measure.vllm_jax").JaxTritonPeers
    unknown = peers(tree).versions()
    assert (unknown["vllm"], unknown["pdl"], unknown["jax-triton"]) == ("unknown", "no", "0")
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0\n")
    known = peers(tree).versions()
    assert (known["vllm"], known["vllm_files"]) == ("0.32.0", unknown["vllm_files"])
    (tree / "vllm/models/minimax_m3/common/ops/sparse_attn.py").write_text("SIZE = 64\n")
    assert peers(tree).versions()["vllm_files"] != known["vllm_files"]


@pytest.mark.parametrize(
    ("capability", "pdl", "uses"),
    [
        ((9, 0), True, "yes"),
        ((12, 0), True, "yes"),
        ((8, 9), True, "no"),
        (None, True, "no"),
        ((9, 0), False, "no, though vLLM uses it on this GPU"),
    ],
)
def test_programmatic_dependent_launch_as_vllm_decides(tree, capability, pdl, uses):
    sources = vllm.Sources(tree, TORCH, capability=capability, pdl=pdl)
    platform = sources.platform
    for variant in ("amd", "common"):
        sources.module(variant)
        assert platform.is_arch_support_pdl() == (uses == "yes")
        assert (platform.is_cuda(), platform.is_rocm()) == (True, False)
    sources.module("amd gfx950")  # no NVIDIA GPU, to vLLM
    assert not platform.is_arch_support_pdl()
    assert (platform.is_cuda(), platform.is_rocm()) == (False, True)
    assert platform.is_device_capability((12, 0)) == (capability == (12, 0))
    assert sources.versions()["pdl"] == uses


def test_the_generic_policy_on_rocm_is_that_of_an_amd_gpu(tree, monkeypatch):
    monkeypatch.setattr(environment, "lowering_platform", lambda: "rocm")
    sources = vllm.Sources(tree, TORCH, capability=None, pdl=False)
    sources.module("amd")
    assert (sources.platform.is_cuda(), sources.platform.is_rocm(), sources.gfx950) == (False, True, False)


class Array(np.ndarray):
    """As much of a tensor as is used of one."""

    def unbind(self, axis):
        assert axis == 0
        return [row.view(Array) for row in self]

    def clone(self):
        return self.copy()

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


def array(values):
    return np.asarray(values).view(Array)


class Cuda:
    """CUDA as PyTorch shows it, where time is the number of replays so far."""

    def __init__(self):
        self.replays = self.captured = 0
        self.graph = lambda graph, stream: contextlib.nullcontext()
        self.stream = lambda stream: contextlib.nullcontext()
        self.Stream = self.synchronize = lambda: None
        self.CUDAGraph = lambda: self
        self.get_device_capability = lambda: (9, 0)
        self.is_available = lambda: True

    def replay(self):
        self.replays += 1

    def Event(self, enable_timing):
        event = types.SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.replays)
        event.elapsed_time = lambda end: (end.at - event.at) * 0.006  # ms
        return event


@pytest.fixture
def torch(monkeypatch):
    import triton

    module = types.ModuleType("torch")
    vars(module).update(vars(TORCH))
    module.cuda = Cuda()
    module.version = types.SimpleNamespace(hip=None)
    module.__version__ = "0"
    module.int32 = np.int32
    module.from_dlpack = array
    module.no_grad = lambda: contextlib.nullcontext()
    module.zeros = lambda shape, dtype, device: array(np.zeros(shape, dtype))
    monkeypatch.setattr(triton, "set_allocator", lambda allocator: None)
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.delitem(sys.modules, "m3_pallas.measure.vllm_torch", raising=False)
    return module


@pytest.mark.parametrize("seen", [True, False])
def test_pytorch_runs_the_calls_as_a_graph(tree, torch, monkeypatch, seen):
    vllm_torch = importlib.import_module("m3_pallas.measure.vllm_torch")
    launched = []

    def traced(replay, calls):
        replay()
        return profiling.DeviceTime(2.5 * calls, {}) if seen else None

    def decode(query, pages, table, lens, topk, *, completion_counter=None):
        launched.append((float(query[0, 0, 0]), completion_counter))
        return array(np.full((2, 6, topk), query[0, 0, 0]))

    monkeypatch.setattr(vllm_torch, "traced", traced)
    (tree / "vllm/models/minimax_m3/amd/ops/index_topk.py").write_text("minimax_m3_index_decode = None\n")
    (tree / "vllm/models/minimax_m3/common/ops/index_topk.py").write_text("")
    peers = vllm_torch.make(tree)
    assert peers.versions()["pdl"] == "yes"
    peers.sources.module("amd").minimax_m3_index_decode = decode
    queries = np.broadcast_to(np.arange(1.0, 6.0)[:, None, None, None], (5, 6, 2, 128))
    time, ids = peers.decode("amd", queries, (np.zeros(1), np.zeros(1), np.zeros(1)), (4,))
    np.testing.assert_array_equal(ids, np.ones((2, 6, 4)))  # of the first query
    assert [query for query, _ in launched] == [1, 1, 2, 3, 1, 2, 3, 4, 5]  # once, to warm up, captured
    counters = {id(counter) for _, counter in launched}
    assert len(counters) == 1  # no call zeroes one of its own
    assert launched[0][1].shape == (2, 6)
    if seen:
        assert time == profiling.DeviceTime(12.5, {})
        assert torch.cuda.replays == 1
    else:  # one replay of 6 us between the events, of five calls, with another in front of it
        assert (time.span, time.method) == (pytest.approx(1.2), profiling.GRAPH)
        assert torch.cuda.replays == 1 + 2 * 7
