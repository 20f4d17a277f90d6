"""`minimax_m3_index_decode` through Mosaic: one kernel, and the page-16 table by the shared code."""

import jax
import jax.numpy as jnp

from m3_pallas import sparse_table, xla
from m3_pallas.mosaic_tpu import decode_kernel, device, selection


def unsupported(
    idx_q: jax.Array, pages: jax.Array, *, requests: int, num_blocks: int, topk: int, max_query_len: int
) -> str | None:
    """Why the kernel cannot serve these shapes and dtypes, or None."""
    heads = idx_q.shape[1]
    if heads * max_query_len > device.LANES:
        return f"{heads} heads of {max_query_len} query tokens are above {device.LANES} rows; use None or 'xla'"
    return (
        device.unsupported_cache(idx_q, pages)
        or selection.unsupported(num_blocks)
        or decode_kernel.unsupported(idx_q, pages, requests=requests, num_blocks=num_blocks, topk=topk)
    )


def index_decode(
    idx_q, pages, block_table, seq_lens, out, attention_block_table, counter,
    *, num_blocks, topk, init_blocks, local_blocks, query_len, block_page_stride, interpret, platform,
):  # fmt: skip
    """Selected ids `[H, T, K]` (or `out`'s shape), the page-16 table and its lengths, the zeroed counter."""
    tokens, heads, dim = idx_q.shape
    requests = seq_lens.shape[0]
    rows = heads * query_len
    queries = idx_q.reshape(requests, query_len, heads, dim).transpose(0, 2, 1, 3).reshape(requests, rows, dim)
    ids = decode_kernel.select_blocks(
        jnp.pad(queries, ((0, 0), (0, device.LANES - rows), (0, 0))),
        pages,
        block_table,
        seq_lens,
        width=min(num_blocks, block_table.shape[1]),
        query_len=query_len,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        interpret=device.interpret_params(interpret),
    )  # [R, slots, 128]
    ids = ids[:, :topk, :rows].reshape(requests, topk, heads, query_len)
    topk_idx = ids.transpose(2, 0, 3, 1).reshape(heads, tokens, topk)
    table = lens = None
    if attention_block_table is not None:
        table, lens = sparse_table.build_sparse_block_table_decode(
            topk_idx, attention_block_table, seq_lens, query_len, block_page_stride
        )
    return xla.write_rows(out, topk_idx), table, lens, xla.clear_rows(counter, tokens)
