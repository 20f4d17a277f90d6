"""Prefill score kernel: block maxima of a tile of query rows, on the matrix unit.

A program owns a tile of consecutive query tokens of one request, all heads of them side by side in the rows of one
product `[rows, D] x [D, 128]`, so that every page is loaded once for all; and a chunk of the blocks the tile sees. It
finds its tile from `cu_seqlens_q` itself. Rows past the last request form a tile that sees nothing. The program also
writes -inf to its share of the columns no row of the tile sees.

The trick: a maximum that ignores NaN is right wherever it reaches `NAN_SCORE`. The loop over blocks that every row
sees whole takes that maximum alone, one instruction a product; if ever it falls short, the careful loop, which masks
and maps NaN, starts over from the first block.

Limits: D a power of two from 16; heads are padded to a power of two and masked.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from m3_pallas import policy, rules
from m3_pallas.rules import BLOCK_SHIFT, BLOCK_SIZE
from m3_pallas.triton import device
from m3_pallas.triton.device import plgpu

FULL_DEPTH = 16  # of D that a float32 product takes at a time
FILL_COLUMNS = 32  # columns of -inf stored at a time


def prefill_score(
    idx_q: jax.Array,  # [T, H, D]
    pages: jax.Array,  # [P, 128, D]
    block_table: jax.Array,  # [R, N]
    cu_seqlens_q: jax.Array,  # [R + 1]
    seq_lens: jax.Array,  # [R]
    prefix_lens: jax.Array,  # [R]
    *,
    launch: policy.ScoreLaunch,
    width: int,
    interpret: bool,
) -> jax.Array:
    """Raw block maxima `[H, T, width]`, -inf where a block is not visible."""
    tokens, heads, _ = idx_q.shape
    tile_tokens = max(launch.rows // pl.next_power_of_2(heads), 1)
    # Every request, and the rows past the last, may end in a partly filled tile.
    tiles = policy.ceil_div(tokens, tile_tokens) + seq_lens.shape[0]
    (score,) = device.call(
        functools.partial(
            _score_kernel, tiles=tiles, num_chunks=launch.num_chunks, tile_tokens=tile_tokens, width=width
        ),
        name="m3_prefill_score",
        grid=tiles * launch.num_chunks,
        out_shape=(jax.ShapeDtypeStruct((heads, tokens, width), jnp.float32),),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        aliases={},
        interpret=interpret,
    )(idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens)
    return score


def _score_kernel(
    q_ref,  # [T, H, D]
    pages_ref,  # [P, 128, D]
    table_ref,  # [R, N]
    starts_ref,  # [R + 1]
    seq_lens_ref,  # [R]
    prefix_ref,  # [R]
    score_ref,  # [H, T, S]
    *,
    tiles,
    num_chunks,
    tile_tokens,
    width,
):
    tokens, heads, dim = q_ref.shape
    requests, table_width = table_ref.shape
    num_pages = pages_ref.shape[0]
    dtype = rules.product_dtype(q_ref.dtype, pages_ref.dtype, both_float8=jnp.float16)
    chunk, tile = device.divmod_static(pl.program_id(0), tiles)  # programs side by side share their pages
    tile = tiles - 1 - tile  # the last tiles see most: they start first
    request, first_row, end_row = _find_tile(starts_ref, tile, requests, tokens, tile_tokens)

    def run():
        owner = jnp.minimum(request, requests - 1)
        prefix = rules.clip_position(plgpu.load(prefix_ref.at[owner]))
        limit = jnp.clip(plgpu.load(seq_lens_ref.at[owner]), 0, min(table_width, width) * BLOCK_SIZE)
        limit = jnp.where(request < requests, limit, 0)
        base = prefix - jnp.clip(plgpu.load(starts_ref.at[owner]), 0, tokens)  # of row 0, were it the request's

        def visible(row):
            return jnp.minimum(rules.visible_tokens(base + row), limit)

        num_blocks = rules.num_visible_blocks(visible(jnp.minimum(first_row + tile_tokens, end_row) - 1))
        size = device.divmod_static(num_blocks + (num_chunks - 1), num_chunks)[0]
        first = jnp.minimum(chunk * size, num_blocks)
        end = jnp.minimum(first + size, num_blocks)
        whole = jnp.clip(visible(first_row) >> BLOCK_SHIFT, first, end)  # blocks before see no mask

        # [rows], head by head
        lane = lax.iota(jnp.int32, pl.next_power_of_2(heads) * tile_tokens)
        head, row = lane >> int(math.log2(tile_tokens)), first_row + (lane & (tile_tokens - 1))
        real = (head < heads) & (row < end_row)
        kv = visible(row)

        def score_all():
            def load_queries(column):
                return plgpu.load(
                    q_ref.at[row[:, None], head[:, None], column[None, :]],
                    mask=real[:, None] & (column[None, :] >= 0),
                    other=0.0,
                ).astype(dtype)

            def multiply(queries, keys):
                return lax.dot_general(
                    queries,
                    keys.astype(dtype),
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
                    preferred_element_type=jnp.float32,
                )  # [rows, 128]

            whole_queries = load_queries(lax.iota(jnp.int32, dim))  # [rows, D]
            token = lax.iota(jnp.int32, BLOCK_SIZE)

            def products(block):
                page = jnp.clip(plgpu.load(table_ref.at[owner, block]), 0, num_pages - 1)
                if dtype != jnp.float32 or dim <= FULL_DEPTH:
                    return multiply(whole_queries, plgpu.load(pages_ref.at[page]))

                # No matrix unit: the product is unrolled, and only so much of it fits the registers.
                def part(i, total):
                    queries = load_queries(i * FULL_DEPTH + lax.iota(jnp.int32, FULL_DEPTH))
                    depth = pl.ds(i * FULL_DEPTH, FULL_DEPTH)
                    return total + multiply(queries, plgpu.load(pages_ref.at[page, :, depth]))

                start = jnp.zeros((row.shape[0], BLOCK_SIZE), jnp.float32)
                return lax.fori_loop(0, dim // FULL_DEPTH, part, start)

            def fast(block, short):
                maxima = jnp.max(products(block), axis=1)
                plgpu.store(score_ref.at[head, row, block], maxima, mask=real)
                return short | (~(maxima >= rules.NAN_SCORE)).astype(jnp.int32)

            def careful(block, carry):
                seen = (block * BLOCK_SIZE + token)[None, :] < kv[:, None]
                maxima = jnp.max(jnp.where(seen, rules.clean_products(products(block)), -jnp.inf), axis=1)
                plgpu.store(score_ref.at[head, row, block], maxima, mask=real)
                return carry

            short = lax.fori_loop(first, whole, fast, jnp.zeros_like(row))
            again = jnp.max(short * real.astype(jnp.int32)) > 0
            lax.fori_loop(jnp.where(again, first, whole), end, careful, None)

        pl.when(first < end)(score_all)
        hidden = device.divmod_static(width - num_blocks + (num_chunks - 1), num_chunks)[0]
        _fill(score_ref, head, row, real, num_blocks + chunk * hidden, hidden, width)

    pl.when(request <= requests)(run)


def _find_tile(starts_ref, tile, requests, tokens, tile_tokens):
    """Request, first row and end of the request's rows of a tile; the rows past the last request are request R's.

    The request is above R for tiles that do not exist.
    """
    lane = lax.iota(jnp.int32, pl.next_power_of_2(requests + 1))
    start = jnp.clip(plgpu.load(starts_ref.at[jnp.minimum(lane, requests)]), 0, tokens)
    end = jnp.clip(plgpu.load(starts_ref.at[jnp.minimum(lane + 1, requests)]), 0, tokens)
    end = jnp.where(lane == requests, tokens, end)
    rows = jnp.where(lane <= requests, jnp.maximum(end - start, 0), 0)
    tiles_of = lax.div(rows + (tile_tokens - 1), jnp.int32(tile_tokens))
    done = jnp.cumsum(tiles_of, dtype=jnp.int32) <= tile
    request = jnp.sum(done & (lane <= requests), dtype=jnp.int32)
    nth = tile - jnp.sum(jnp.where(done, tiles_of, 0), dtype=jnp.int32)
    own = lane == request
    first_row = jnp.sum(jnp.where(own, start, 0), dtype=jnp.int32) + nth * tile_tokens
    return request, first_row, jnp.sum(jnp.where(own, end, 0), dtype=jnp.int32)


def _fill(score_ref, head, row, real, first, size, width):
    """-inf to `size` columns from `first`, as far as there are."""
    column = lax.iota(jnp.int32, FILL_COLUMNS)[None, :]
    end = jnp.minimum(first + size, width)

    def step(i, carry):
        at = first + i * FILL_COLUMNS + column
        nothing = jnp.full((head.shape[0], FILL_COLUMNS), -jnp.inf, jnp.float32)
        plgpu.store(score_ref.at[head[:, None], row[:, None], at], nothing, mask=real[:, None] & (at < end))
        return carry

    steps = lax.div(jnp.maximum(end - first, 0) + (FILL_COLUMNS - 1), jnp.int32(FILL_COLUMNS))
    lax.fori_loop(jnp.int32(0), steps, step, None)
