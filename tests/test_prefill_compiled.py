"""Compile gates of the prefill kernels, with Triton's own backends: no GPU needed."""

import jax
import jax.numpy as jnp
import pytest

import m3_pallas
from tests.test_decode_compiled import DTYPES, check, triton_compile  # skips both files without the Triton it needs

ARCHITECTURES = ["gfx942", "gfx950", "sm_90"]


def compile_score(arch, heads, tokens, max_seq_len, *, requests=2, dtype=jnp.bfloat16, cache=None):
    def score(*arrays):
        return m3_pallas.minimax_m3_index_score(
            *arrays, tokens, max_seq_len, heads, implementation="pallas_triton"
        )  # fmt: skip

    shape, i32 = jax.ShapeDtypeStruct, jnp.int32
    lengths = [shape((size,), i32) for size in (requests + 1, requests, requests)]
    queries, pages = shape((tokens, heads, 128), dtype), shape((64, 128, 128), cache or dtype)
    [report] = triton_compile.compile_kernels(
        score, (queries, pages, shape((requests, max_seq_len // 128), i32), *lengths), arch
    )
    return report


@pytest.mark.parametrize("tokens", [64, 8192])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_score(arch, heads, tokens):
    report = compile_score(arch, heads, tokens, 128 * 1024)
    check(report)
    assert ("wgmma" if arch == "sm_90" else "v_mfma") in report.text
    assert report.wide_loads >= 8
    # Two programs of eight warps a multiprocessor; two waves a SIMD.
    assert report.occupancy >= (16 if arch == "sm_90" else 2)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_other_dtypes(arch, dtypes):
    dtype, cache = DTYPES[dtypes]
    check(compile_score(arch, 4, 1024, 32 * 1024, dtype=dtype, cache=cache))


@pytest.mark.parametrize(("width", "topk"), [(64, 16), (1024, 16), (8192, 16), (1024, 32), (1024, 64)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_selection(arch, width, topk):
    def select(*arrays):
        return m3_pallas.minimax_m3_index_topk(*arrays, 1024, topk, 0, 1, implementation="pallas_triton")

    shape = jax.ShapeDtypeStruct
    arrays = (shape((4, 1024, width), jnp.float32), shape((3,), jnp.int32), shape((2,), jnp.int32))
    [report] = triton_compile.compile_kernels(select, arrays, arch)
    if topk == 64 and arch != "sm_90":
        assert report.scratch == 0  # some scalars go to vector registers, none to memory
    else:
        check(report)
    if topk == 16:  # 32 programs a multiprocessor, which holds no more; three waves a SIMD
        assert report.occupancy >= (32 if arch == "sm_90" else 3)
