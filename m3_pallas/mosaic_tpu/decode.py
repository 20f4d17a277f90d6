"""`minimax_m3_index_decode` through Mosaic: one kernel, and the page-16 table by the shared code."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from m3_pallas import policy, sparse_table, xla
from m3_pallas.mosaic_tpu import kernel

VMEM_BYTES = 12 << 20  # for the order keys: chips give a kernel 16 MiB unless asked
MIN_DIM = 128


def unsupported(idx_q: jax.Array, pages: jax.Array, *, num_blocks: int, max_query_len: int) -> str | None:
    """Why the kernel cannot serve these shapes and dtypes, or None."""
    _, heads, dim = idx_q.shape
    if dim % MIN_DIM:
        return f"head dim {dim} is not a multiple of {MIN_DIM}; use None or 'xla'"
    if heads * max_query_len > kernel.LANES:
        return f"{heads} heads of {max_query_len} query tokens are above {kernel.LANES} rows; use None or 'xla'"
    for name, dtype in (("idx_q", idx_q.dtype), ("index_kv_cache", pages.dtype)):
        if dtype.name not in ("bfloat16", "float32"):
            return f"{name} of {dtype.name} is not served, only bfloat16 and float32; use None or 'xla'"
    blocks = policy.ceil_div(num_blocks, kernel.PASS_BLOCKS) * kernel.PASS_BLOCKS
    if blocks * kernel.LANES * 4 > VMEM_BYTES:
        return f"{num_blocks} blocks do not fit in VMEM; use None or 'xla'"
    return None


def index_decode(
    idx_q, pages, block_table, seq_lens, out, attention_block_table, counter,
    *, num_blocks, topk, init_blocks, local_blocks, query_len, block_page_stride, interpret, platform,
):  # fmt: skip
    """Selected ids `[H, T, K]` (or `out`'s shape), the page-16 table and its lengths, the zeroed counter."""
    tokens, heads, dim = idx_q.shape
    requests = seq_lens.shape[0]
    rows = heads * query_len
    queries = idx_q.reshape(requests, query_len, heads, dim).transpose(0, 2, 1, 3).reshape(requests, rows, dim)
    ids = kernel.select_blocks(
        jnp.pad(queries, ((0, 0), (0, kernel.LANES - rows), (0, 0))),
        pages,
        block_table,
        seq_lens,
        width=min(num_blocks, block_table.shape[1]),
        query_len=query_len,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        interpret=interpret_params() if interpret else False,
    )  # [R, slots, 128]
    ids = ids[:, :topk, :rows].reshape(requests, topk, heads, query_len)
    topk_idx = ids.transpose(2, 0, 3, 1).reshape(heads, tokens, topk)
    table = lens = None
    if attention_block_table is not None:
        table, lens = sparse_table.build_sparse_block_table_decode(
            topk_idx, attention_block_table, seq_lens, query_len, block_page_stride
        )
    return xla.write_rows(out, topk_idx), table, lens, xla.clear_rows(counter, tokens)


def interpret_params():
    """The TPU interpreter with its checks on: races, reads out of bounds, memory never written."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
