"""`minimax_m3_index_decode` through Triton: scores, then selection, two launches."""

import jax
from jax.experimental import pallas as pl

from m3_pallas import policy
from m3_pallas.triton import device, scoring, selection

MIN_DIM = 16
MAX_COLUMNS = 128  # heads times query tokens, each padded to a power of two


def unsupported(idx_q: jax.Array, pages: jax.Array, *, topk: int, max_query_len: int, interpret: bool) -> str | None:
    """Why the kernels cannot serve these shapes and dtypes here, or None."""
    _, heads, dim = idx_q.shape
    columns = pl.next_power_of_2(heads) * pl.next_power_of_2(max_query_len)
    if columns > MAX_COLUMNS:
        return f"{heads} heads of {max_query_len} query tokens need more than {MAX_COLUMNS} columns; use None or 'xla'"
    reason = unsupported_cache(dim, pages) or selection.unsupported_topk(topk)
    return reason or device.unavailable(interpret=interpret)


def unsupported_cache(dim: int, pages: jax.Array) -> str | None:
    """Why no Triton kernel can read these pages, or None."""
    if dim < MIN_DIM or dim & (dim - 1):
        return f"head dim {dim} is not a power of two from {MIN_DIM}; use None or 'xla'"
    # Pallas addresses arrays of up to 2**32 bytes by int32 elements: right for all but one-byte ones.
    if pages.dtype.itemsize == 1 and 2**31 < pages.size <= 2**32:
        return f"a float8 cache of {pages.shape[0]} pages is between 2 and 4 GiB; use None, 'xla' or more pages"
    return None


def index_decode(
    idx_q,
    pages,
    block_table,
    seq_lens,
    out,
    attention_block_table,
    counter,
    *,
    num_blocks,
    topk,
    init_blocks,
    local_blocks,
    query_len,
    max_query_len,
    block_page_stride,
    launch,
    interpret,
    platform,
):
    """Selected ids `[H, T, K]` (or `out`'s shape), the page-16 table and its lengths, the zeroed counter."""
    tokens, heads, dim = idx_q.shape
    width = min(num_blocks, block_table.shape[1])
    if launch is None:
        launch = policy.decode_launch(
            arch=policy_arch(platform, interpret),
            requests=seq_lens.shape[0],
            heads=heads,
            tokens=tokens,
            num_blocks=num_blocks,
            topk=topk,
            head_dim=dim,
            query_dtype=idx_q.dtype.name,
            cache_dtype=pages.dtype.name,
            max_decode_query_len=max_query_len,
        )
    scored, zeros = scoring.decode_score(
        idx_q,
        pages,
        block_table,
        seq_lens,
        counter,
        launch=launch.score,
        width=width,
        query_len=query_len,
        max_query_len=max_query_len,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        interpret=interpret,
    )
    topk_idx, zeros, table, lens = selection.decode_select(
        scored,
        seq_lens,
        zeros,
        out,
        attention_block_table,
        launch=launch.selection,
        width=width,
        query_len=query_len,
        topk=topk,
        block_page_stride=block_page_stride,
        interpret=interpret,
    )
    return topk_idx, table, lens, None if counter is None else zeros


def policy_arch(platform: str, interpret: bool) -> str:
    return device.DEFAULT_ARCH[platform] if interpret else device.architecture(platform)
