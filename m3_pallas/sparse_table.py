"""Page-16 sparse block tables: the physical 16-token pages of each row's selected blocks, for paged attention."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from m3_pallas import checks, rules
from m3_pallas.rules import PAGES_PER_BLOCK


def build_sparse_block_table_decode(
    topk_idx: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    decode_query_len: int = 1,
    block_page_stride: int = PAGES_PER_BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """The page-16 table of decode rows; row `r * decode_query_len + j` is the request's j-th newest token.

    Args:
      topk_idx: `[1, T, K]` int32, selected block ids; ids below 0 or past the row's own block are skipped.
      block_table: `[R, N']` int32, page of each block in the attention cache, in units of `block_page_stride`
        16-token pages.
      seq_lens: `[R]` int32, this step's tokens included.
      decode_query_len: query tokens a request, T / R.
      block_page_stride: 16-token page ids one block spans: 8, or 16 where K and V share a block.

    Returns:
      `sparse_block_table [T, K * 8]` int32: full blocks in selection order, then the row's own block, then zeros;
      `sparse_context_lens [T]` int32: tokens those pages hold for the row.

    Raises:
      ValueError: on mismatched shapes or a stride other than 8 and 16. TypeError: on other dtypes.
    """
    length = checks.at_least("decode_query_len", decode_query_len, 1)
    stride = checks.table(topk_idx, block_table, block_page_stride)
    checks.int32_array("seq_lens", seq_lens, (block_table.shape[0],), "[R]")
    tokens = topk_idx.shape[1]
    if tokens != seq_lens.shape[0] * length:
        raise ValueError(
            f"topk_idx must have R * decode_query_len = {seq_lens.shape[0]} * {length} rows, "
            f"got shape {list(topk_idx.shape)}"
        )
    if 0 in (tokens, *block_table.shape):
        return empty_table(topk_idx)
    request, position = rules.decode_rows(seq_lens, length, rules.MAX_DECODE_BLOCKS)
    return _build(topk_idx, block_table, request, position, stride=stride)


def build_sparse_block_table_prefill(
    topk_idx: jax.Array,
    block_table: jax.Array,
    query_req_id: jax.Array,
    query_abs_pos: jax.Array,
    block_page_stride: int = PAGES_PER_BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """The page-16 table of prefill rows; `prefill_rows` makes the two row arrays.

    Args:
      topk_idx: `[1, T, K]` int32, selected block ids; ids below 0 or past the row's own block are skipped.
      block_table: `[R, N']` int32, as for decode.
      query_req_id: `[T]` int32, request of each row.
      query_abs_pos: `[T]` int32, position of each row; negative for padding.
      block_page_stride: as for decode.

    Returns:
      `sparse_block_table [T, K * 8]` and `sparse_context_lens [T]`, int32, as for decode.

    Raises:
      ValueError: on mismatched shapes or a stride other than 8 and 16. TypeError: on other dtypes.
    """
    stride = checks.table(topk_idx, block_table, block_page_stride)
    tokens = topk_idx.shape[1]
    checks.int32_array("query_req_id", query_req_id, (tokens,), "[T]")
    checks.int32_array("query_abs_pos", query_abs_pos, (tokens,), "[T]")
    if 0 in (tokens, *block_table.shape):
        return empty_table(topk_idx)
    request = jnp.clip(query_req_id, 0, block_table.shape[0] - 1)
    return _build(topk_idx, block_table, request, query_abs_pos, stride=stride)


def empty_table(topk_idx: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, tokens, topk = topk_idx.shape
    return jnp.zeros((tokens, topk * PAGES_PER_BLOCK), jnp.int32), jnp.zeros((tokens,), jnp.int32)


@functools.partial(jax.jit, static_argnames="stride")
def _build(topk_idx, block_table, request, position, *, stride):
    _, tokens, topk = topk_idx.shape
    ids = topk_idx[0]  # [T, K]
    width = block_table.shape[1]
    kept, slot, lens = rules.table_slots(ids, position, width)
    first_page = block_table[request[:, None], jnp.clip(ids, 0, width - 1)] * stride
    pages = first_page[:, :, None] + lax.iota(jnp.int32, PAGES_PER_BLOCK)[None, None, :]  # [T, K, 8]
    row = lax.broadcasted_iota(jnp.int32, (tokens, topk), 0)
    table = jnp.zeros_like(pages).at[row, slot].set(jnp.where(kept[:, :, None], pages, 0), unique_indices=True)
    return table.reshape(tokens, topk * PAGES_PER_BLOCK), lens
