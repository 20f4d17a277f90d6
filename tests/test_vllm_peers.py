"""Loading vLLM's kernels: what is found, what is refused, and its Python code run on stand-ins for tensors."""

import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3_pallas.measure import vllm

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


def test_a_chain_that_is_no_command_buffer_is_launched(tree, jax_triton, monkeypatch):
    vllm_jax = importlib.import_module("m3_pallas.measure.vllm_jax")
    refusals = [jax.errors.JaxRuntimeError("CUDA_ERROR_NOT_SUPPORTED")] * 2

    def device_time(function, *arguments, calls):
        if refusals:
            raise refusals.pop()
        return function(*arguments), calls

    monkeypatch.setattr(vllm_jax, "device_time", device_time)
    peers = vllm_jax.JaxTritonPeers(tree)
    firsts, rest = (jnp.zeros(3), jnp.ones(3)), (jnp.ones(3),)

    def run(firsts, rest):
        return firsts[1] + rest

    with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_SUPPORTED"):  # both ways
        peers._time(run, firsts, rest)
    refusals[:] = [jax.errors.JaxRuntimeError("CUDA_ERROR_NOT_SUPPORTED")]
    total, calls = peers._time(run, firsts, rest)
    np.testing.assert_array_equal(total, [2, 2, 2])
    assert calls == 2
    # The option reaches the compiler, which knows it: one that it does not know it refuses.
    refusals[:] = [jax.errors.JaxRuntimeError("CUDA_ERROR_NOT_SUPPORTED")]
    monkeypatch.setattr(vllm_jax, "NO_COMMAND_BUFFER", {"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        peers._time(run, firsts, rest)
