"""The portable implementation: plain XLA, exact, in bounded memory, with work proportional to the visible blocks.

Scoring walks (tile, chunk) pairs: a tile is up to `TILE_ROWS` query rows of one request, a chunk some consecutive
blocks of its table. One pair is one matrix product, `[rows * H, D] x [D, chunk * 128]`; the loop's trip count
follows the lengths, so padding and short requests cost nothing. Windows that would cross the end of an array move
back inside it and recompute what they overlap.
"""

import functools

import jax.numpy as jnp
from jax import lax

from m3_pallas import policy, rules, sparse_table
from m3_pallas.manual_axes import vary_like
from m3_pallas.rules import BLOCK_SIZE

TILE_ROWS = 128  # prefill rows of a tile
SCORE_BYTES = 8 << 20  # temporaries of one product
SELECT_BYTES = 16 << 20  # temporaries of one selection slice


def index_decode(
    idx_q, pages, block_table, seq_lens, out, attention_block_table, counter,
    *, num_blocks, topk, init_blocks, local_blocks, query_len, block_page_stride,
):  # fmt: skip
    """Selected ids `[H, T, K]` (or `out`'s shape), the page-16 table and its lengths, the zeroed counter."""
    width = min(num_blocks, block_table.shape[1])
    request, position = rules.decode_rows(seq_lens, query_len, width)
    kv = rules.visible_tokens(position)
    first_row = query_len * lax.iota(jnp.int32, seq_lens.shape[0])
    score = _score(idx_q, pages, block_table, request, kv, request[first_row], first_row, query_len, width)
    topk_idx = _select(score, rules.num_visible_blocks(kv), topk, init_blocks, local_blocks)
    table = lens = None
    if attention_block_table is not None:
        table, lens = sparse_table.build_sparse_block_table_decode(
            topk_idx, attention_block_table, seq_lens, query_len, block_page_stride
        )
    return write_rows(out, topk_idx), table, lens, clear_rows(counter, idx_q.shape[0])


def index_score(idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, *, width):
    """Raw block maxima `[H, T, width]`, -inf where a block is not visible."""
    tokens, requests = idx_q.shape[0], seq_lens.shape[0]
    request, position = rules.prefill_rows(cu_seqlens_q, prefix_lens, tokens)
    limit = jnp.clip(seq_lens, 0, block_table.shape[1] * BLOCK_SIZE)[request]
    kv = jnp.minimum(rules.visible_tokens(position), limit)
    rows = min(TILE_ROWS, tokens)
    # Tiles start at each request's first row; there are at most this many.
    tiles_of = (jnp.clip(jnp.diff(cu_seqlens_q), 0, tokens) + rows - 1) // rows  # [R]
    last_tile = jnp.cumsum(tiles_of, dtype=jnp.int32)  # [R]
    tile = lax.iota(jnp.int32, tokens // rows + requests)
    tile_request, nth = _locate(tile, tiles_of, last_tile)
    first_row = jnp.clip(cu_seqlens_q[tile_request] + nth * rows, 0, tokens - rows)
    first_row = jnp.where(tile < last_tile[-1], first_row, 0)
    tile_request = jnp.where(tile < last_tile[-1], tile_request, -1)
    return _score(idx_q, pages, block_table, request, kv, tile_request, first_row, rows, width)


def index_topk(score, cu_seqlens_q, prefix_lens, out, *, topk, init_blocks, local_blocks):
    """Selected ids `[H, T, K]` (or `out`'s shape) of scores `[H, T, S]`."""
    num_blocks = rules.prefill_row_blocks(cu_seqlens_q, prefix_lens, score.shape[1], score.shape[2])
    return write_rows(out, _select(score, num_blocks, topk, init_blocks, local_blocks))


def write_rows(out, rows):
    """`rows [H, T, K]` as they are, or written over the first T rows of `out`."""
    return rows if out is None else lax.dynamic_update_slice(out, rows, (0,) * out.ndim)


def take_rows(array, first, rows):
    """`array[first : first + rows]`, for loops."""
    bits, back = _as_integers(array, first)
    return back(lax.dynamic_slice_in_dim(bits, first, rows))


def clear_rows(counter, tokens):
    """A completion counter `[H, >=T]` with its first T columns zeroed, if there is one."""
    return None if counter is None else counter.at[:, :tokens].set(0)


def _locate(index, counts, ends):
    """Which segment each flat index falls in, and its place there; `ends` is the cumulative sum of `counts`."""
    segment = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, counts.shape[0] - 1)
    return segment, index - (ends - counts)[segment]


def _score(idx_q, pages, block_table, request, kv, tile_request, first_row, rows, width):
    """Block maxima `[H, T, width]` of rows that see `kv [T]` tokens of `request [T]`, by tiles of `rows` rows."""
    tokens, heads, dim = idx_q.shape
    num_pages, table_width = pages.shape[0], block_table.shape[1]
    dtype = rules.product_dtype(idx_q.dtype, pages.dtype)
    block_bytes = BLOCK_SIZE * (dim * (pages.dtype.itemsize + dtype.itemsize) + rows * heads * 4)
    chunk = max(1, min(SCORE_BYTES // block_bytes, width, table_width))
    chunk = policy.even_size(width, chunk)

    window = first_row[:, None] + lax.iota(jnp.int32, rows)[None, :]  # [tiles, rows]
    own = request[window] == tile_request[:, None]
    tile_kv = jnp.max(jnp.where(own, kv[window], 0), axis=1)
    chunks_of = (rules.num_visible_blocks(tile_kv) + chunk - 1) // chunk  # [tiles]
    ends = jnp.cumsum(chunks_of, dtype=jnp.int32)

    def step(i, score):
        tile, nth = (x[0] for x in _locate(jnp.full(1, i, jnp.int32), chunks_of, ends))
        row, own_request = first_row[tile], tile_request[tile]
        first_block = jnp.minimum(nth * chunk, width - chunk)
        blocks = first_block + lax.iota(jnp.int32, chunk)
        page = block_table[own_request, jnp.minimum(blocks, table_width - 1)]
        keys = _gather(pages, jnp.clip(page, 0, num_pages - 1))  # [chunk, 128 * D]
        keys = keys.reshape(chunk * BLOCK_SIZE, dim).astype(dtype)
        query = take_rows(idx_q, row, rows).reshape(rows * heads, dim).astype(dtype)
        dots = lax.dot_general(
            query,
            keys,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        dots = rules.clean_products(dots).reshape(rows, heads, chunk, BLOCK_SIZE)
        token = blocks[:, None] * BLOCK_SIZE + lax.iota(jnp.int32, BLOCK_SIZE)[None, :]  # [chunk, 128]
        row_kv = lax.dynamic_slice_in_dim(kv, row, rows)
        seen = token[None, :, :] < row_kv[:, None, None]  # [rows, chunk, 128]
        maxima = jnp.max(jnp.where(seen[:, None], dots, -jnp.inf), axis=-1).transpose(1, 0, 2)  # [H, rows, chunk]
        own_row = lax.dynamic_slice_in_dim(request, row, rows) == own_request
        start = (jnp.int32(0), row, first_block)
        old = lax.dynamic_slice(score, start, (heads, rows, chunk))
        return lax.dynamic_update_slice(score, jnp.where(own_row[None, :, None], maxima, old), start)

    score = jnp.full((heads, tokens, width), -jnp.inf, jnp.float32)
    score = vary_like(score, idx_q, pages, block_table, kv, request, ends)
    return lax.fori_loop(jnp.int32(0), ends[-1], step, score)


def _as_integers(array, index):
    """`array` as integers of its width, for a slice or gather at `index` in a loop, and the way back.

    XLA:CPU slices and gathers no 16-bit floats: it would convert all of `array` first. The barrier keeps the
    reinterpretation in the loop; hoisted out of it, it would be a copy.
    """
    array, _ = lax.optimization_barrier((array, index))
    bits = lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return bits, functools.partial(lax.bitcast_convert_type, new_dtype=array.dtype)


def _gather(pages, page):
    """`pages[page]`, `[chunk, 128 * D]`."""
    bits, back = _as_integers(pages.reshape(pages.shape[0], -1), page)
    return back(bits[page])


def _select(score, num_blocks, topk, init_blocks, local_blocks):
    """Ids `[H, T, K]` of scores `[H, T, S]` whose rows see `num_blocks [T]` blocks, by slices of bounded size."""
    heads, tokens, width = score.shape
    rows = heads * tokens
    flat = score.reshape(rows, width)
    flat_blocks = jnp.broadcast_to(num_blocks[None, :], (heads, tokens)).reshape(rows)
    slice_rows = max(1, min(rows, SELECT_BYTES // (16 * width)))

    def select_slice(i, ids):
        row = jnp.minimum(i * slice_rows, rows - slice_rows)
        part = lax.dynamic_slice_in_dim(flat, row, slice_rows)
        blocks = lax.dynamic_slice_in_dim(flat_blocks, row, slice_rows)
        chosen = _select_rows(part, blocks, topk, init_blocks, local_blocks)
        return lax.dynamic_update_slice_in_dim(ids, chosen, row, axis=0)

    ids = vary_like(jnp.full((rows, topk), -1, jnp.int32), score, num_blocks)
    ids = lax.fori_loop(jnp.int32(0), jnp.int32(policy.ceil_div(rows, slice_rows)), select_slice, ids)
    return ids.reshape(heads, tokens, topk)


def _select_rows(score, num_blocks, topk, init_blocks, local_blocks):
    rows, width = score.shape
    block = lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    score = rules.force_scores(score, block, num_blocks[:, None], init_blocks, local_blocks)
    # Hidden blocks tie with visible -inf ones, and lose the tie: their ids are higher.
    score = jnp.where(block < num_blocks[:, None], rules.order_score(score), -jnp.inf)
    found = min(topk, width)
    # XLA:CPU's top_k is a stable partial sort. Elsewhere its ties are unspecified; a sort by both words is exact.
    ids = lax.platform_dependent(
        score,
        cpu=lambda score: lax.top_k(score, found)[1],
        default=lambda score: lax.sort((~rules.order_key(score), block), num_keys=2)[1][:, :found],
    )
    rank = lax.broadcasted_iota(jnp.int32, (rows, found), 1)
    ids = jnp.where(rank < num_blocks[:, None], ids, -1)
    return jnp.pad(ids, ((0, 0), (0, topk - found)), constant_values=-1)
