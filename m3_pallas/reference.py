"""The contract as loops over tokens and blocks: the oracle every implementation is tested against. NumPy only.

Legend: R requests, T query tokens, H index heads, D head dim, P pages, N table width, S score width,
B = ceil(max_seq_len / 128), K = topk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

BLOCK_SIZE = 128
PAGES_PER_BLOCK = 8
INIT_SCORE = np.float32(1e30)
LOCAL_SCORE = np.float32(1e29)
NAN_SCORE = np.float32(-1e30)


def index_decode(
    idx_q: np.ndarray,  # [T, H, D]
    pages: np.ndarray,  # [P, 128, D]
    block_table: np.ndarray,  # [R, N]
    seq_lens: np.ndarray,  # [R]
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    decode_query_len: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Selected ids `[H, T, K]`, and the scores they come from `[H, T, N]`, forced values included."""
    tokens, heads, _ = idx_q.shape
    ids = np.full((heads, tokens, topk), -1, np.int32)
    score = np.full((heads, tokens, block_table.shape[1]), -np.inf, np.float32)
    for row, request, position in decode_rows(seq_lens, decode_query_len):
        kv = max(position + 1, 0)
        for head in range(heads):
            raw = block_scores(idx_q[row, head], pages, block_table[request], kv)
            forced = force(raw, init_blocks, local_blocks)
            chosen = select(forced, topk)
            score[head, row, : len(forced)] = forced
            ids[head, row, : len(chosen)] = chosen
    return ids, score


def index_score(
    idx_q: np.ndarray,  # [T, H, D]
    pages: np.ndarray,  # [P, 128, D]
    block_table: np.ndarray,  # [R, N]
    cu_seqlens_q: np.ndarray,  # [R + 1]
    seq_lens: np.ndarray,  # [R]
    prefix_lens: np.ndarray,  # [R]
    *,
    max_seq_len: int,
) -> np.ndarray:
    """Raw block maxima `[H, T, round_up(B, 16)]`, -inf where a block is not visible."""
    tokens, heads, _ = idx_q.shape
    width = 16 * math.ceil(math.ceil(max_seq_len / BLOCK_SIZE) / 16)
    score = np.full((heads, tokens, width), -np.inf, np.float32)
    for row, request, position in prefill_rows(cu_seqlens_q, prefix_lens):
        kv = min(position + 1, int(seq_lens[request]))
        for head in range(heads):
            raw = block_scores(idx_q[row, head], pages, block_table[request], kv)
            score[head, row, : len(raw)] = raw
    return score


def index_topk(
    score: np.ndarray,  # [H, T, S]
    cu_seqlens_q: np.ndarray,  # [R + 1]
    prefix_lens: np.ndarray,  # [R]
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
) -> np.ndarray:
    """Selected ids `[H, T, K]` of raw scores."""
    heads, tokens, _ = score.shape
    ids = np.full((heads, tokens, topk), -1, np.int32)
    for row, _, position in prefill_rows(cu_seqlens_q, prefix_lens):
        num_blocks = position // BLOCK_SIZE + 1
        for head in range(heads):
            chosen = select(force(score[head, row, :num_blocks], init_blocks, local_blocks), topk)
            ids[head, row, : len(chosen)] = chosen
    return ids


def decode_rows(seq_lens: np.ndarray, decode_query_len: int) -> Iterator[tuple[int, int, int]]:
    """Row, request and position of every decode token; the position is negative where the row is empty."""
    for request, length in enumerate(seq_lens.tolist()):
        for query in range(decode_query_len):
            yield request * decode_query_len + query, request, length - decode_query_len + query


def prefill_rows(cu_seqlens_q: np.ndarray, prefix_lens: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Row, request and position of every prefill token."""
    for request, prefix in enumerate(prefix_lens.tolist()):
        first, end = cu_seqlens_q[request : request + 2].tolist()
        for row in range(first, end):
            yield row, request, prefix + row - first


def block_scores(query: np.ndarray, pages: np.ndarray, table: np.ndarray, kv: int) -> np.ndarray:
    """Block maxima `[ceil(kv / 128)]` of one query `[D]` over the first `kv` tokens of one request."""
    scores = []
    for block in range(math.ceil(kv / BLOCK_SIZE)):
        tokens = min(BLOCK_SIZE, kv - block * BLOCK_SIZE)
        keys = pages[table[block], :tokens].astype(np.float32)  # [tokens, D]
        with np.errstate(invalid="ignore", over="ignore"):
            products = keys @ query.astype(np.float32)
        products[np.isnan(products)] = NAN_SCORE
        scores.append(products.max())
    return np.asarray(scores, np.float32)


def force(scores: np.ndarray, init_blocks: int, local_blocks: int) -> np.ndarray:
    """The scores of one row's visible blocks `[n]`, forced blocks overwritten."""
    scores, num_blocks = scores.copy(), len(scores)
    for block in range(num_blocks):
        if block >= max(0, num_blocks - local_blocks):
            scores[block] = LOCAL_SCORE
        elif block < init_blocks:
            scores[block] = INIT_SCORE
    return scores


def select(scores: np.ndarray, topk: int) -> list[int]:
    """Ids of the best `min(K, n)` of one row's visible blocks `[n]`, best first, equal scores by lower id."""

    def rank(block: int) -> tuple[float, int]:
        score = NAN_SCORE if np.isnan(scores[block]) else scores[block]
        return -float(score) + 0.0, block  # + 0.0 makes -0.0 and +0.0 one

    return sorted(range(len(scores)), key=rank)[:topk]


def sparse_block_table(
    ids: np.ndarray, table: np.ndarray, position: int, block_page_stride: int
) -> tuple[np.ndarray, int]:
    """One row's page-16 table `[K * 8]` and context length, from its ids `[K]` and its request's table `[N']`."""
    kv, own_block = max(position + 1, 0), position // BLOCK_SIZE
    kept = [block for block in ids.tolist() if 0 <= block <= own_block]
    full = [block for block in kept if block < own_block]
    tail = [block for block in kept if block == own_block]
    out = np.zeros(len(ids) * PAGES_PER_BLOCK, np.int32)
    for slot, block in enumerate(full + tail):
        first_page = table[block] * block_page_stride
        out[slot * PAGES_PER_BLOCK : (slot + 1) * PAGES_PER_BLOCK] = first_page + np.arange(PAGES_PER_BLOCK)
    if tail:
        return out, BLOCK_SIZE * len(full) + kv - BLOCK_SIZE * own_block
    return out, min(BLOCK_SIZE * len(kept), kv)


def insert_index_cache(pages: np.ndarray, index_k: np.ndarray, slot_mapping: np.ndarray) -> np.ndarray:
    """Pages `[P, 128, D]` with `index_k [tokens, D]` written to the slots that lie inside."""
    pages = pages.copy()
    for key, slot in zip(index_k, slot_mapping.tolist(), strict=True):
        if 0 <= slot < pages.shape[0] * BLOCK_SIZE:
            pages[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key.astype(pages.dtype)
    return pages
