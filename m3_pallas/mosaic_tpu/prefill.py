"""`minimax_m3_index_score` and `minimax_m3_index_topk` through Mosaic, one kernel each."""

import jax

from m3_pallas import rules, xla
from m3_pallas.mosaic_tpu import device, prefill_scoring, prefill_selection, selection


def score_unsupported(idx_q: jax.Array, pages: jax.Array, block_table: jax.Array) -> str | None:
    """Why the score kernel cannot serve these shapes and dtypes, or None."""
    heads = idx_q.shape[1]
    if heads > prefill_scoring.MAX_HEADS:
        return f"{heads} heads are above {prefill_scoring.MAX_HEADS}; use None or 'xla'"
    return device.unsupported_cache(idx_q, pages) or prefill_scoring.unsupported(
        idx_q, pages, requests=block_table.shape[0]
    )


def topk_unsupported(score: jax.Array, topk: int) -> str | None:
    """Why the selection kernel cannot serve these shapes, or None."""
    return selection.unsupported(score.shape[2]) or prefill_selection.unsupported(score, topk)


def index_score(idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, *, width, interpret, platform):
    """Raw block maxima `[H, T, width]`, -inf where a block is not visible."""
    return prefill_scoring.prefill_score(
        idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, width=width, interpret=interpret
    )


def index_topk(
    score, cu_seqlens_q, prefix_lens, out, *, topk, init_blocks, local_blocks, interpret, platform
):  # fmt: skip
    """Selected ids `[H, T, K]` (or `out`'s shape) of scores `[H, T, S]`."""
    ids = prefill_selection.prefill_select(
        score,
        rules.prefill_row_blocks(cu_seqlens_q, prefix_lens, score.shape[1], score.shape[2]),
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        interpret=interpret,
    )
    return xla.write_rows(out, ids)
