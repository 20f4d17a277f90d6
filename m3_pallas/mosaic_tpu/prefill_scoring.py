"""Prefill score kernel: rows in tiles of the score array, pages read once for all the tiles of a request.

A tile is up to 512 rows (tokens times heads) of the score array and 128 of its columns. Where requests meet in a tile
it is visited once for each: a segment is the rows that one request has in one tile. The grid walks the segments in
order, chunk of 128 blocks by chunk. When a request's first segment comes, the copies of all its pages in the chunk
start; each is awaited when a segment first needs it, so that later segments find the keys in VMEM. Keys lie along
sublanes and rows along lanes, as in decode; a tile's maxima are turned once, when it is written.

Limit: eight heads, for tiles of at least 64 tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m3_pallas import policy, rules
from m3_pallas.manual_axes import outputs_like
from m3_pallas.mosaic_tpu import device
from m3_pallas.mosaic_tpu.device import LANES, STEP_PAGES
from m3_pallas.rules import BLOCK_SIZE

TILE_ROWS = 512
MAX_HEADS = 8
CHUNK = 128  # blocks of a tile
CHUNK_STEPS = CHUNK // STEP_PAGES


def tile_tokens(tokens: int, heads: int) -> int:
    """Query tokens of a tile."""
    return min(TILE_ROWS // policy.ceil_power_of_two(heads), policy.ceil_div(tokens, LANES) * LANES)


def unsupported(idx_q: jax.Array, pages: jax.Array, *, requests: int) -> str | None:
    """Why the kernel's arrays do not fit on the chip, or None."""
    tokens, heads, dim = idx_q.shape
    keys = CHUNK * BLOCK_SIZE * dim * pages.dtype.itemsize + device.step_bytes(dim)
    queries = 2 * TILE_ROWS * dim * idx_q.dtype.itemsize
    scores = 3 * TILE_ROWS * CHUNK * 4
    segments = policy.ceil_div(tokens, max(tile_tokens(tokens, heads), 1)) + requests + 1
    return device.unsupported_memory(keys + queries + scores, 4 * len(Segments._fields) * segments)


class Segments(NamedTuple):
    """The rows of each request in each tile, in order; `[S]` int32, S = tiles + R + 1. Empty ones see no block."""

    first: jax.Array  # row
    end: jax.Array  # row
    tile: jax.Array
    request: jax.Array
    kv: jax.Array  # tokens that the first row sees, each further row one more
    limit: jax.Array  # but no more than these
    blocks: jax.Array  # that the last row sees
    request_blocks: jax.Array  # that the request's last row sees


def segments_of(cu_seqlens_q, seq_lens, prefix_lens, *, tokens: int, rows: int, max_tokens: int) -> Segments:
    """The segments of tiles of `rows` rows; no row sees more than `max_tokens` tokens."""
    tiles = policy.ceil_div(tokens, rows)
    row_request, row_position = rules.prefill_rows(cu_seqlens_q, prefix_lens, tokens)
    starts = jnp.concatenate([rows * lax.iota(jnp.int32, tiles), jnp.clip(cu_seqlens_q, 0, tokens)])
    first = jnp.sort(starts)
    end = jnp.concatenate([first[1:], jnp.full((1,), tokens, jnp.int32)])
    row = jnp.minimum(first, tokens - 1)
    request = row_request[row]
    kv = jnp.where(end > first, rules.visible_tokens(row_position[row]), 0)
    limit = jnp.clip(seq_lens, 0, max_tokens)[request]
    last_kv = jnp.minimum(kv + (end - first - 1), limit)
    blocks = jnp.where(kv > 0, rules.num_visible_blocks(last_kv), 0)
    request_blocks = jnp.zeros(seq_lens.shape, jnp.int32).at[request].max(blocks)[request]
    return Segments(first, end, lax.div(row, jnp.int32(rows)), request, kv, limit, blocks, request_blocks)


def prefill_score(
    idx_q: jax.Array,  # [T, H, D]
    pages: jax.Array,  # [P, 128, D]
    block_table: jax.Array,  # [R, N]
    cu_seqlens_q: jax.Array,  # [R + 1]
    seq_lens: jax.Array,  # [R]
    prefix_lens: jax.Array,  # [R]
    *,
    width: int,
    interpret: bool,
) -> jax.Array:
    """Raw block maxima `[H, T, width]`, -inf where a block is not visible."""
    tokens, heads, dim = idx_q.shape
    rows = tile_tokens(tokens, heads)
    padded = max(tokens, rows)
    chunks = policy.ceil_div(width, CHUNK)
    visible = min(width, block_table.shape[1])
    segments = segments_of(
        cu_seqlens_q, seq_lens, prefix_lens, tokens=tokens, rows=rows, max_tokens=visible * BLOCK_SIZE
    )  # fmt: skip
    queries = jnp.pad(idx_q.transpose(1, 0, 2), ((0, 0), (0, padded - tokens), (0, 0)))
    table = jnp.pad(block_table[:, :visible], ((0, 0), (0, chunks * CHUNK - visible)))[:, None]  # [R, 1, chunks * 128]
    out_shape = jax.ShapeDtypeStruct((heads, padded, max(width, CHUNK)), jnp.float32)
    (out_shape,) = outputs_like((out_shape,), queries, pages, table, cu_seqlens_q, seq_lens, prefix_lens)
    products = heads * tokens * width * BLOCK_SIZE
    score = pl.pallas_call(
        functools.partial(_score_kernel, rows=rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(chunks, segments.first.shape[0]),
            in_specs=[
                pl.BlockSpec((heads, rows, dim), lambda c, s, seg: (0, seg.tile[s], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((heads, rows, CHUNK), lambda c, s, seg: (0, seg.tile[s], c)),
            scratch_shapes=[
                pltpu.SMEM((1, CHUNK), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.VMEM((CHUNK_STEPS, STEP_PAGES, BLOCK_SIZE, dim), pages.dtype),
                pltpu.VMEM((CHUNK, heads * rows), jnp.float32),
                pltpu.SemaphoreType.DMA((1,)),
                pltpu.SemaphoreType.DMA((CHUNK_STEPS,)),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=device.VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * dim,
            bytes_accessed=block_table.shape[0] * visible * BLOCK_SIZE * dim * pages.dtype.itemsize
            + heads * tokens * width * 4,
            transcendentals=0,
        ),
        interpret=device.interpret_params(interpret),
        name="m3_prefill_score",
    )(segments, queries, pages, table)
    return score[:, :tokens, :width]


def _score_kernel(
    seg: Segments,  # scalar memory
    q_ref,  # [H, rows, D]
    pages_ref,  # [P, 128, D], HBM
    table_ref,  # [R, 1, chunks * 128], HBM
    score_ref,  # [H, rows, 128]
    row_ref,  # [1, 128], scalar memory: the request's pages of the chunk
    loaded_ref,  # [2], scalar memory: blocks whose copies started; steps awaited
    keys_ref,  # [steps, 8, 128, D]
    maxima_ref,  # [128, H * rows]
    row_sem,
    step_sems,
    *,
    rows,
):
    chunk, s = pl.program_id(0), pl.program_id(1)
    heads, _, dim = q_ref.shape
    lanes = heads * rows
    first_block = chunk * CHUNK
    before = jnp.maximum(s - 1, 0)
    new_tile = (s == 0) | (seg.tile[s] != seg.tile[before])
    new_request = (s == 0) | (seg.request[s] != seg.request[before])

    def within(blocks):
        return jnp.clip(blocks - first_block, 0, CHUNK)

    def steps_of(blocks):
        return lax.div(blocks + (STEP_PAGES - 1), jnp.int32(STEP_PAGES))

    def copies(step, act):
        first = step * STEP_PAGES
        device.for_pages(
            pages_ref, lambda block: row_ref[0, block], first, loaded_ref[0] - first,
            keys_ref.at[step], step_sems.at[step], act,
        )  # fmt: skip

    def wait_until(steps):
        lax.fori_loop(loaded_ref[1], steps, lambda step, _: copies(step, lambda copy: copy.wait()), None)
        loaded_ref[1] = jnp.maximum(loaded_ref[1], steps)

    def load():
        blocks = within(seg.request_blocks[s])
        loaded_ref[0] = blocks
        loaded_ref[1] = 0

        def start():
            first = pl.multiple_of(first_block, CHUNK)
            copy = pltpu.make_async_copy(
                table_ref.at[seg.request[s], :, pl.ds(first, CHUNK)], row_ref, row_sem.at[0]
            )  # fmt: skip
            copy.start()
            copy.wait()
            lax.fori_loop(jnp.int32(0), steps_of(blocks), lambda step, _: copies(step, lambda copy: copy.start()), None)

        pl.when(blocks > 0)(start)

    def score_step(step, masked):
        dtype = rules.product_dtype(q_ref.dtype, pages_ref.dtype)
        dots = lax.dot_general(
            keys_ref[step].reshape(STEP_PAGES * BLOCK_SIZE, dim).astype(dtype),
            q_ref[...].reshape(lanes, dim).astype(dtype),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )  # [8 * 128, H * rows]
        dots = rules.clean_products(dots)
        if masked:
            row = seg.tile[s] * rows + lax.rem(lax.broadcasted_iota(jnp.int32, (1, lanes), 1), jnp.int32(rows))
            token = (first_block + step * STEP_PAGES) * BLOCK_SIZE + lax.broadcasted_iota(jnp.int32, dots.shape, 0)
            dots = jnp.where(token < row_kv(row), dots, -jnp.inf)
        maxima = jnp.max(dots.reshape(STEP_PAGES, BLOCK_SIZE, lanes), axis=1)
        maxima_ref[pl.ds(pl.multiple_of(step * STEP_PAGES, STEP_PAGES), STEP_PAGES), :] = maxima

    def row_kv(row):
        return jnp.minimum(seg.kv[s] + (row - seg.first[s]), seg.limit[s])

    def step(i, carry):
        pl.when(i >= loaded_ref[1])(lambda: wait_until(i + 1))
        whole = (first_block + (i + 1) * STEP_PAGES) * BLOCK_SIZE <= row_kv(seg.first[s])
        pl.when(whole)(lambda: score_step(i, masked=False))
        pl.when(~whole)(lambda: score_step(i, masked=True))
        return carry

    def write():
        row = seg.tile[s] * rows + lax.broadcasted_iota(jnp.int32, (1, rows, 1), 1)
        block = first_block + lax.broadcasted_iota(jnp.int32, (1, 1, CHUNK), 2)
        own = (row >= seg.first[s]) & (row < seg.end[s])
        seen = own & (block < rules.num_visible_blocks(jnp.maximum(row_kv(row), 0)))
        maxima = maxima_ref[...].T.reshape(heads, rows, CHUNK)
        score_ref[...] = jnp.where(seen, maxima, score_ref[...])

    @pl.when((chunk == 0) & (s == 0))
    def _():
        loaded_ref[0] = 0
        loaded_ref[1] = 0

    @pl.when(new_tile)
    def _():
        score_ref[...] = jnp.full(score_ref.shape, -jnp.inf, jnp.float32)

    @pl.when(new_request)
    def _():
        wait_until(steps_of(loaded_ref[0]))  # of the request before
        load()

    steps = steps_of(within(seg.blocks[s]))
    lax.fori_loop(jnp.int32(0), steps, step, None)
    pl.when(steps > 0)(write)

    @pl.when((chunk == pl.num_programs(0) - 1) & (s == pl.num_programs(1) - 1))
    def _():
        wait_until(steps_of(loaded_ref[0]))
