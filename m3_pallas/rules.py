"""The rules every implementation shares: block size, visible range, forced values, order.

Pure `jax.numpy` on any rank, so that XLA code and Pallas kernel bodies call the same functions.
Legend: R requests, T query tokens, K selected blocks; `kv` is the number of tokens a row sees.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

BLOCK_SIZE = 128  # tokens per page, and per sparse block
BLOCK_SHIFT = 7  # log2(BLOCK_SIZE)
INIT_SCORE = 1e30  # forced value of the first `init_blocks`
LOCAL_SCORE = 1e29  # forced value of the last `local_blocks`; wins where both apply
NAN_SCORE = -1e30  # what a NaN product counts as
MAX_DECODE_BLOCKS = 65535  # decode serves fewer blocks than this
PAGES_PER_BLOCK = 8  # 16-token pages of one block
_MAX_POSITION = 1 << 30  # garbage lengths stop here, so that position sums stay in int32
MAX_PREFILL_BLOCKS = _MAX_POSITION // BLOCK_SIZE


def num_visible_blocks(kv: jax.Array) -> jax.Array:
    """Blocks with at least one of the first `kv >= 0` tokens; exact up to `2**31 - 1`."""
    return ((kv - 1) >> BLOCK_SHIFT) + 1


def decode_positions(seq_lens: jax.Array, query: jax.Array, decode_query_len: int, max_blocks: int) -> jax.Array:
    """Position of token `query` of a request whose sequence has `seq_lens` tokens, this step's included.

    Negative where the request is padding or shorter than `decode_query_len`. Lengths are clamped to what
    `max_blocks` blocks hold.
    """
    limit = min(max_blocks * BLOCK_SIZE, _MAX_POSITION)
    return jnp.clip(seq_lens, 0, limit) - decode_query_len + query


def visible_tokens(position: jax.Array) -> jax.Array:
    """Tokens a row at `position` sees: those at or before it."""
    return jnp.maximum(position + 1, 0)


def clip_position(prefix: jax.Array) -> jax.Array:
    """Garbage prefix lengths, kept where sums of positions stay in int32."""
    return jnp.clip(prefix, 0, _MAX_POSITION)


def clean_products(products: jax.Array) -> jax.Array:
    """Map NaN dot products to `NAN_SCORE`. Before the block max: whether a max skips NaN differs by backend."""
    return jnp.where(jnp.isnan(products), jnp.float32(NAN_SCORE), products)


def order_score(score: jax.Array) -> jax.Array:
    """Scores with NaN as `NAN_SCORE` and -0.0 as +0.0, whose plain float order is the contract's order."""
    score = clean_products(score)
    return jnp.where(score == 0, jnp.float32(0), score)


def order_key(score: jax.Array) -> jax.Array:
    """int32 keys in the contract's order: higher first. Equal keys go to the lower block id."""
    bits = lax.bitcast_convert_type(order_score(score), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def force_scores(
    score: jax.Array, block: jax.Array, num_blocks: jax.Array, init_blocks: int, local_blocks: int
) -> jax.Array:
    """Overwrite the forced blocks of a row that sees `num_blocks` blocks. `block` holds the ids of `score`."""
    visible = block < num_blocks
    if init_blocks:
        forced = visible & (block < min(init_blocks, _MAX_POSITION))
        score = jnp.where(forced, jnp.float32(INIT_SCORE), score)
    if local_blocks:
        forced = visible & (block >= num_blocks - min(local_blocks, _MAX_POSITION))
        score = jnp.where(forced, jnp.float32(LOCAL_SCORE), score)
    return score


def decode_rows(seq_lens: jax.Array, decode_query_len: int, max_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Request and position of each decode row: two `[T]` int32. `seq_lens` is `[R]`, R at least 1."""
    row = lax.iota(jnp.int32, seq_lens.shape[0] * decode_query_len)
    request = lax.div(row, jnp.int32(decode_query_len))
    query = lax.rem(row, jnp.int32(decode_query_len))
    return request, decode_positions(seq_lens[request], query, decode_query_len, max_blocks)


def prefill_rows(cu_seqlens_q: jax.Array, prefix_lens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Request and position of each prefill row: two `[T]` int32; position -1 for rows past `cu_seqlens_q[R]`.

    `cu_seqlens_q` is `[R + 1]`, `prefix_lens` `[R]`, `num_tokens` T. R is at least 1.
    """
    row = lax.broadcasted_iota(jnp.int32, (num_tokens, 1), 0)
    passed = jnp.sum(cu_seqlens_q[None, 1:] <= row, axis=1, dtype=jnp.int32)  # [T] requests that end before the row
    request = jnp.minimum(passed, prefix_lens.shape[0] - 1)
    offset = row[:, 0] - cu_seqlens_q[request]
    owned = (passed == request) & (offset >= 0) & (offset < num_tokens)
    prefix = clip_position(prefix_lens)[request]
    return request, jnp.where(owned, prefix + offset, -1)


def prefill_row_blocks(cu_seqlens_q: jax.Array, prefix_lens: jax.Array, num_tokens: int, width: int) -> jax.Array:
    """Blocks each prefill row ranks, `[T]` int32: 0 for rows past `cu_seqlens_q[R]`, at most the score's `width`."""
    _, position = prefill_rows(cu_seqlens_q, prefix_lens, num_tokens)
    return jnp.clip(num_visible_blocks(position + 1), 0, width)


def product_dtype(query: DTypeLike, keys: DTypeLike, both_float8: DTypeLike = jnp.bfloat16) -> jnp.dtype:
    """The dtype both operands are cast to, exactly, before the product: float8 rises to its partner (to `both_float8`
    if both are float8), two different wider types rise to float32."""
    wide = {jnp.dtype(dtype) for dtype in (query, keys)} - {jnp.dtype(jnp.float8_e4m3fn)}
    if not wide:
        return jnp.dtype(both_float8)
    return wide.pop() if len(wide) == 1 else jnp.dtype(jnp.float32)


def _running(part: jax.Array) -> jax.Array:
    return jnp.cumsum(part, axis=-1, dtype=jnp.int32)


def table_slots(ids: jax.Array, position: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where a row's selected blocks go in its page-16 table.

    Args:
      ids: `[..., K]`, selected block ids.
      position: `[...]`, of the row; negative for an empty one.
      width: blocks of the attention block table.

    Returns:
      Which ids are kept, `[..., K]` bool; the slot of each, `[..., K]`, a permutation: full blocks in order, then the
      row's own block, then what is dropped; the tokens the kept blocks hold for the row, `[...]`.
    """
    kv = visible_tokens(position)
    own_block = num_visible_blocks(kv) - 1  # -1 for an empty row
    kept = (ids >= 0) & (ids <= own_block[..., None]) & (ids < width)
    full = (kept & (ids < own_block[..., None])).astype(jnp.int32)
    own = kept.astype(jnp.int32) - full
    dropped = 1 - full - own
    num_full = jnp.sum(full, axis=-1, dtype=jnp.int32)
    num_own = jnp.sum(own, axis=-1, dtype=jnp.int32)
    first_own = num_full[..., None]
    first_dropped = (num_full + num_own)[..., None]
    slot = full * _running(full) + own * (first_own + _running(own)) + dropped * (first_dropped + _running(dropped)) - 1
    with_own = num_full * BLOCK_SIZE + kv - own_block * BLOCK_SIZE
    length = jnp.where(num_own > 0, with_own, jnp.minimum(num_full * BLOCK_SIZE, kv))
    return kept, slot, length
