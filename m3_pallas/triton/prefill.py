"""`minimax_m3_index_score` and `minimax_m3_index_topk` through Triton, one launch each."""

import jax
from jax.experimental import pallas as pl

from m3_pallas import policy
from m3_pallas.triton import decode, device, prefill_scoring, prefill_selection, selection

MAX_HEADS = 64  # so that a tile holds a token at least
MAX_REQUESTS = 8191  # each program looks its tile up in all of them


def score_unsupported(idx_q: jax.Array, pages: jax.Array, block_table: jax.Array, *, interpret: bool) -> str | None:
    """Why the score kernel cannot serve these shapes and dtypes here, or None."""
    _, heads, dim = idx_q.shape
    if heads > MAX_HEADS:
        return f"{heads} heads are above {MAX_HEADS}; use None or 'xla'"
    reason = decode.unsupported_cache(dim, pages) or _unsupported_requests(block_table.shape[0])
    return reason or device.unavailable(interpret=interpret)


def topk_unsupported(prefix_lens: jax.Array, *, topk: int, interpret: bool) -> str | None:
    """Why the selection kernel cannot serve these shapes here, or None."""
    reason = selection.unsupported_topk(topk) or _unsupported_requests(prefix_lens.shape[0])
    return reason or device.unavailable(interpret=interpret)


def _unsupported_requests(requests: int) -> str | None:
    if requests > MAX_REQUESTS:
        return f"{requests} requests are above {MAX_REQUESTS}; use None or 'xla'"
    return None


def index_score(
    idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, *, width, launch, interpret, platform
):  # fmt: skip
    """Raw block maxima `[H, T, width]`, -inf where a block is not visible."""
    tokens, heads, _ = idx_q.shape
    if launch is None:
        launch = policy.prefill_score_launch(
            arch=decode.policy_arch(platform, interpret),
            heads=pl.next_power_of_2(heads),
            tokens=tokens,
            num_blocks=width,
            query_dtype=idx_q.dtype.name,
            cache_dtype=pages.dtype.name,
        )
    return prefill_scoring.prefill_score(
        idx_q,
        pages,
        block_table,
        cu_seqlens_q,
        seq_lens,
        prefix_lens,
        launch=launch,
        width=width,
        interpret=interpret,
    )


def index_topk(
    score, cu_seqlens_q, prefix_lens, out, *, topk, init_blocks, local_blocks, launch, interpret, platform
):  # fmt: skip
    """Selected ids `[H, T, K]` (or `out`'s shape) of scores `[H, T, S]`."""
    if launch is None:
        launch = policy.prefill_topk_launch(arch=decode.policy_arch(platform, interpret), topk=topk)
    return prefill_selection.prefill_select(
        score,
        cu_seqlens_q,
        prefix_lens,
        out,
        launch=launch,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        interpret=interpret,
    )
