"""What the indexer sees while a tiny MiniMax-M3 serves four requests: queries and keys of its last sparse layer.

Recorded in bfloat16 from `examples/decode_loop.py`, where the selected blocks equal those of Hugging Face transformers.
"""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np

from m3_pallas.measure.cases import BLOCK, Decode, Prefill

FILE = pathlib.Path(__file__).parent / "data" / "tiny_m3_index.npz"


def cases() -> list[tuple[str, Decode | Prefill, dict]]:
    """Name, case and inputs of a decode call, all steps of all requests at once, and of a ragged prefill call."""
    with np.load(FILE) as file:
        arrays = {name: file[name] for name in file}
    topk = int(arrays.pop("topk"))
    arrays = {name: bits.view(ml_dtypes.bfloat16) for name, bits in arrays.items()}
    requests = sorted({name.split("/")[0] for name in arrays})
    keys = [arrays[f"{request}/index_k"] for request in requests]
    pages, table = _paged(keys)

    decoded = [arrays[f"{request}/decode_q"] for request in requests]  # [S, H, D] each
    heads = decoded[0].shape[1]
    seq_lens = [len(k) - len(q) + 1 + np.arange(len(q)) for k, q in zip(keys, decoded, strict=True)]
    lengths = np.concatenate(seq_lens).astype(np.int32)
    decode = dict(
        idx_q=np.concatenate(decoded),
        index_kv_cache=pages,
        block_table=np.repeat(table, [len(q) for q in decoded], axis=0),
        seq_lens=lengths,
        max_seq_len=max(map(len, keys)),
    )
    prompts = [arrays.get(f"{request}/prefill_q", decoded[0][:0]) for request in requests]
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    prefill = dict(
        idx_q=np.concatenate(prompts),
        index_kv_cache=pages,
        block_table=table,
        cu_seqlens_q=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        seq_lens=lens,
        prefix_lens=np.zeros_like(lens),
        max_query_len=int(lens.max()),
        max_seq_len=int(lens.max()),
    )
    return [
        (
            "tiny M3, decode",
            Decode(seq_lens=tuple(lengths.tolist()), heads=heads, topk=topk),
            decode,
        ),
        (
            "tiny M3, prefill",
            Prefill(query_lens=tuple(lens.tolist()), prefix_lens=(0,) * len(lens), heads=heads, topk=topk),
            prefill,
        ),
    ]


def _paged(keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled pages `[P, 128, D]`, NaN where there is no token, and their table `[R, N]`."""
    blocks = [-(-len(k) // BLOCK) for k in keys]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    pages = np.full((sum(blocks), BLOCK, keys[0].shape[1]), np.nan, keys[0].dtype)
    table = np.full((len(keys), max(blocks)), 2**30, np.int32)
    used = 0
    for r, (k, count) in enumerate(zip(keys, blocks, strict=True)):
        table[r, :count] = order[used : used + count]
        for block in range(count):
            part = k[block * BLOCK : (block + 1) * BLOCK]
            pages[table[r, block], : len(part)] = part
        used += count
    return pages, table
