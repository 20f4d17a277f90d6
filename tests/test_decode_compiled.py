"""Compile gates of the decode kernels, with Triton's own backends: no GPU needed."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import m3_pallas
from m3_pallas import policy

pytest.importorskip("triton", minversion="3.9", reason="the compile gates need the triton wheel, 3.9 or newer")
from tests import triton_compile

# Waves a SIMD that vLLM 0.32.0's score kernel gets from the same compiler on gfx950, by (one column, warps).
VLLM_OCCUPANCY = {(True, 4): 4, (True, 2): 2, (False, 4): 3, (False, 2): 3}
LDS_BYTES = 64 * 1024
PAGE_BYTES = 128 * 128 * 2


def compile_decode(
    arch, requests, heads, query_len, max_seq_len, *,
    table=False, dtype=jnp.bfloat16, cache=None, pages=64, topk=16,
):  # fmt: skip
    shape = jax.ShapeDtypeStruct
    arrays = [
        shape((requests * query_len, heads, 128), dtype),
        shape((pages, 128, 128), cache or dtype),
        shape((requests, max_seq_len // 128), jnp.int32),
        shape((requests,), jnp.int32),
    ]
    if table:
        arrays.append(arrays[2])

    def decode(queries, pages, block_table, seq_lens, attention_table=None):
        options = dict(attention_block_table=attention_table, block_page_stride=8) if table else {}
        return m3_pallas.minimax_m3_index_decode(
            queries, pages, block_table, seq_lens, max_seq_len, topk, 0, 1, heads, query_len, query_len,
            implementation="pallas_triton", **options,
        )  # fmt: skip

    return triton_compile.compile_kernels(decode, tuple(arrays), arch)


def check(report):
    assert report.spills == 0
    if report.arch.startswith("gfx"):
        assert report.scratch == 0
        assert report.shared_bytes <= LDS_BYTES
    else:
        assert report.scratch <= 8  # ptxas keeps one slot in the two-warp selection


# Batch sizes that get each kind of launch of an architecture: balanced, two warps, generic; a wide or narrow selection.
REQUESTS = {"gfx942": (32,), "gfx950": (1, 32, 100), "sm_90": (1, 100)}
HEADS, QUERY_LENS = (1, 2, 4), (1, 4)


def launch_kinds(arch, batch_sizes):
    """Score launches by heads and query length, and selections, with their numbers of programs left out."""
    kinds = set()
    for requests, heads, query_len in itertools.product(batch_sizes, HEADS, QUERY_LENS):
        launch = policy.decode_launch(
            arch=arch, requests=requests, heads=heads, tokens=requests * query_len, num_blocks=1024, topk=16,
            head_dim=128, query_dtype="bfloat16", cache_dtype="bfloat16", max_decode_query_len=query_len,
        )  # fmt: skip
        for part, shape in ((launch.score, (heads, query_len)), (launch.selection, ())):
            fields = {k: v for k, v in dataclasses.asdict(part).items() if k not in ("num_chunks", "budget")}
            kinds.add((type(part), shape, *fields.items()))
    return kinds


@pytest.mark.parametrize("arch", REQUESTS)
def test_every_kind_of_launch_is_compiled(arch):
    assert launch_kinds(arch, REQUESTS[arch]) == launch_kinds(arch, range(1, 257))


@pytest.mark.parametrize("query_len", QUERY_LENS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("arch", "requests"), [(arch, size) for arch, sizes in REQUESTS.items() for size in sizes])
def test_score(arch, requests, heads, query_len):
    score, selection = compile_decode(arch, requests, heads, query_len, 128 * 1024)
    one_column = heads == query_len == 1
    assert score.kernel.startswith("m3_decode_score")
    check(score)
    check(selection)
    # A step loads its keys 16 bytes a lane; the pipelined and the masked loop may each hold the loads again.
    lanes = score.warps * (64 if arch.startswith("gfx") else 32)
    assert score.wide_loads >= PAGE_BYTES // 2 // (16 * lanes)
    if arch.startswith("gfx"):
        assert score.occupancy >= VLLM_OCCUPANCY[one_column, score.warps]
    assert one_column == (score.matrix_ops == 0) or arch == "sm_90"
    if arch == "sm_90":
        assert "wgmma" in score.text


@pytest.mark.parametrize("max_seq_len", [4096, 8192, 1024 * 1024, 2**22], ids=["4K", "8K", "1M", "4M"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_selection(arch, max_seq_len):
    selection = compile_decode(arch, 4, 1, 1, max_seq_len, table=True)[1]
    assert selection.kernel == "m3_decode_select"
    check(selection)
    if arch.startswith("gfx"):
        assert selection.occupancy >= 4


@pytest.mark.parametrize("topk", [16, 64])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_winners_are_announced_by_the_wave_that_stored_them(arch, topk):
    """AMD's barrier waits for no store and its atomic for those of its own wave, which is the first."""
    selection = compile_decode(arch, 4, 1, 1, 128 * 1024, topk=topk)[1]
    lines = selection.layouts.splitlines()
    one_lane_each = {line.split()[0] for line in lines if "sizePerThread = [1], threadsPerWarp = [64]" in line}
    atomic = next(i for i, line in enumerate(lines) if "tt.atomic_rmw" in line)
    stores = [re.search(r"tensor<(\d+)x.*?, (#\w+)>", line) for line in lines[:atomic] if "tt.store" in line]
    assert len(stores) >= 3  # ids of a row of one chunk; keys and ids of the others
    assert all(store and int(store[1]) <= 64 and store[2] in one_lane_each for store in stores)


DTYPES = {
    "float16": (jnp.float16, jnp.float16),
    "float32": (jnp.float32, jnp.float32),
    "float8": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "bfloat16 on float8": (jnp.bfloat16, jnp.float8_e4m3fn),
    "bfloat16 on float16": (jnp.bfloat16, jnp.float16),
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_other_dtypes(arch, dtypes):
    dtype, cache = DTYPES[dtypes]
    for heads in (1, 4):
        check(compile_decode(arch, 32, heads, 1, 32 * 1024, dtype=dtype, cache=cache)[0])


@pytest.mark.parametrize("arch", ["gfx950", "sm_90"])
def test_offsets_of_a_long_cache_are_64_bit(arch):
    """131,072 pages of D 128 are `2**31` elements."""
    score = compile_decode(arch, 32, 4, 1, 32 * 1024, pages=140_000)[0]
    wide = {"sm_90": "mul.wide.", "gfx950": "v_mad_i64_i32|v_lshlrev_b64|v_lshl_add_u64|v_mad_u64_u32"}[arch]
    assert any(text in score.text for text in wide.split("|"))
