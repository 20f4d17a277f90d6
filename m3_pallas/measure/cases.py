"""The golden cases: inputs, regenerated from a seed, and vLLM's answers. NumPy and ml_dtypes only.

Each case names one call. `decode_inputs` and `prefill_inputs` rebuild the exact arrays; `data/golden.npz` holds,
under `<case>/<name>`, what vLLM 0.32.0's own kernels answered for them on an NVIDIA H200: `topk [H, T, K]` int32,
`score [H, T, N]` float32 (NaN where the kernel wrote nothing), `sparse_block_table [T, K * 8]` and
`sparse_context_lens [T]` int32. Decode scores carry the forced values, prefill scores do not. `decode_k1` has no
answer: vLLM's kernel does not compile at K = 1.

Unused cache slots hold NaN and unused block-table entries hold 2**30: whoever reads them answers wrongly.

Legend: R requests, T query tokens, H index heads, D index head dim, P physical pages, N logical blocks per request,
K selected blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 128
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    seq_lens: tuple[int, ...]
    heads: int = 1
    query_len: int = 1
    max_query_len: int = 1
    head_dim: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    dtype: str = "bf16"
    pages: int | None = None  # fewer pages than blocks: pages are shared, scores tie
    values: str = "normal"  # "normal", "integer" (ties), "zero_query", "nan_query"
    table_stride: int | None = None  # 8 or 16: also emit the page-16 sparse table
    seed: int = 0
    keep_score: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    heads: int = 1
    head_dim: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    dtype: str = "bf16"
    seed: int = 0


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """vLLM's answers, by `<case>/<name>`."""
    with np.load(pathlib.Path(__file__).parent / "data" / "golden.npz") as file:
        return dict(file)


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _draw(rng, shape, values):
    if values == "integer":
        return rng.integers(-2, 3, size=shape).astype(np.float32)
    return rng.standard_normal(shape, dtype=np.float32)


def _cache(rng, case, kv_lens, width):
    """Pages with NaN wherever no token was ever written, and their block table."""
    need = sum(_blocks(n) for n in kv_lens)
    shared = getattr(case, "pages", None)
    num_pages = shared if shared is not None else need + 3
    values = getattr(case, "values", "normal")
    cache = _draw(rng, (num_pages, BLOCK, case.head_dim), values)
    # Entries past a request's last block are garbage that must never be read.
    table = np.full((len(kv_lens), width), 2**30, np.int32)
    if shared is not None:
        for r, n in enumerate(kv_lens):
            table[r, : _blocks(n)] = rng.integers(0, num_pages, _blocks(n))
    else:
        order = rng.permutation(num_pages).astype(np.int32)
        used = 0
        for r, n in enumerate(kv_lens):
            count = _blocks(n)
            table[r, :count] = order[used : used + count]
            used += count
            if n % BLOCK:
                cache[table[r, count - 1], n % BLOCK :] = np.nan
        cache[order[used:]] = np.nan
    return cache.astype(DTYPES[case.dtype]), table


def decode_inputs(case: Decode) -> dict[str, Any]:
    rng = np.random.default_rng(case.seed)
    width = max(1, max(_blocks(n) for n in case.seq_lens)) + 2
    cache, table = _cache(rng, case, case.seq_lens, width)
    query = _draw(rng, (len(case.seq_lens) * case.query_len, case.heads, case.head_dim), case.values)
    if case.values == "zero_query":
        query[:] = 0.0
    if case.values == "nan_query":
        query[0] = np.nan
    inputs = dict(
        idx_q=query.astype(DTYPES[case.dtype]),
        index_kv_cache=cache,
        block_table=table,
        seq_lens=np.asarray(case.seq_lens, np.int32),
        max_seq_len=max(1, max(case.seq_lens)),
    )
    if case.table_stride is not None:
        inputs["attention_block_table"] = rng.permutation(table.size).astype(np.int32).reshape(table.shape)
    return inputs


def prefill_inputs(case: Prefill) -> dict[str, Any]:
    rng = np.random.default_rng(case.seed)
    kv_lens = [q + p for q, p in zip(case.query_lens, case.prefix_lens, strict=True)]
    width = max(1, max(_blocks(n) for n in kv_lens)) + 2
    cache, table = _cache(rng, case, kv_lens, width)
    query = _draw(rng, (sum(case.query_lens), case.heads, case.head_dim), "normal")
    return dict(
        idx_q=query.astype(DTYPES[case.dtype]),
        index_kv_cache=cache,
        block_table=table,
        cu_seqlens_q=np.concatenate([[0], np.cumsum(case.query_lens)]).astype(np.int32),
        seq_lens=np.asarray(kv_lens, np.int32),
        prefix_lens=np.asarray(case.prefix_lens, np.int32),
        max_query_len=max(case.query_lens),
        max_seq_len=max(1, max(kv_lens)),
    )


CASES: dict[str, Decode | Prefill] = {
    "decode_one_token": Decode(seq_lens=(1,)),
    "decode_block_edges": Decode(seq_lens=(127, 128, 129, 255, 256, 257), seed=1),
    "decode_more_blocks_than_k": Decode(seq_lens=(2048, 2049, 5000, 130), seed=2),
    "decode_four_heads": Decode(seq_lens=(4999, 17, 1280, 2177, 640), heads=4, seed=3),
    "decode_zero_length_rows": Decode(seq_lens=(0, 700, 0, 3000), heads=2, seed=4),
    "decode_spec_four_tokens": Decode(
        seq_lens=(2, 4, 129, 131, 3000, 2560), heads=2, query_len=4, max_query_len=4, seed=5
    ),
    "decode_spec_three_of_five": Decode(
        seq_lens=(3, 257, 4100), heads=4, query_len=3, max_query_len=5, init_blocks=1, local_blocks=3, seed=6
    ),
    "decode_init_and_local": Decode(seq_lens=(100, 200, 4000), init_blocks=2, local_blocks=2, seed=7),
    "decode_no_forced_blocks": Decode(seq_lens=(4000, 90), init_blocks=0, local_blocks=0, seed=8),
    "decode_ties": Decode(seq_lens=(6000, 3000), values="integer", head_dim=64, seed=9),
    "decode_zero_query": Decode(seq_lens=(6000, 100), values="zero_query", seed=10),
    "decode_nan_query": Decode(seq_lens=(6000, 4000), values="nan_query", seed=11),
    "decode_k12": Decode(seq_lens=(4000, 1000), topk=12, heads=2, seed=12),
    "decode_k1": Decode(seq_lens=(4000, 1000), topk=1, seed=13),
    "decode_k32": Decode(seq_lens=(6001, 1000), topk=32, seed=14),
    "decode_shared_pages": Decode(seq_lens=(128 * 700 + 5, 128 * 90), pages=64, seed=15, keep_score=False),
    "decode_9000_blocks": Decode(seq_lens=(128 * 9000,), pages=512, seed=16, keep_score=False),
    "decode_fp8": Decode(seq_lens=(5000, 1281), heads=4, dtype="e4m3fn", seed=17),
    "decode_f16_dim64": Decode(seq_lens=(5000, 1281), heads=2, dtype="f16", head_dim=64, seed=18),
    "decode_table_stride8": Decode(seq_lens=(0, 60, 128, 2500, 4000), table_stride=8, seed=19),
    "decode_table_stride16_spec": Decode(
        seq_lens=(2, 300, 128, 2500, 4000), query_len=4, max_query_len=4, table_stride=16, seed=20
    ),
    "prefill_fresh": Prefill(query_lens=(5,), prefix_lens=(0,), seed=30),
    "prefill_ragged": Prefill(query_lens=(1, 64, 200), prefix_lens=(0, 128, 1000), heads=4, seed=31),
    "prefill_off_by_one_prefix": Prefill(query_lens=(130, 3), prefix_lens=(127, 2559), heads=2, seed=32),
    "prefill_empty_request": Prefill(query_lens=(40, 0, 70), prefix_lens=(300, 500, 0), seed=33),
    "prefill_long_prefix": Prefill(query_lens=(150,), prefix_lens=(7000,), init_blocks=1, local_blocks=2, seed=34),
    "prefill_k8_dim64_f16": Prefill(
        query_lens=(97, 31), prefix_lens=(2000, 77), topk=8, dtype="f16", head_dim=64, seed=35
    ),
}
