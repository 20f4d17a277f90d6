"""Decode kernel: one program scores a request's pages and selects its blocks; the scores never leave the chip.

The request's table row is copied to scalar memory; then its pages stream from HBM, several to a step and one step
ahead. Keys lie along sublanes and query rows (heads times query tokens, padded to 128) along lanes, so one product
`[pages * 128, D] x [D, 128]` scores a step for all rows, and the block maxima of a step are a maximum over sublanes
that lands at a sublane offset.

Limits: heads times query tokens up to 128; the blocks of `selection`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m3_pallas import policy, rules
from m3_pallas.manual_axes import outputs_like
from m3_pallas.mosaic_tpu import device, selection
from m3_pallas.mosaic_tpu.device import LANES, STEP_PAGES
from m3_pallas.rules import BLOCK_SIZE


def unsupported(idx_q: jax.Array, pages: jax.Array, *, requests: int, num_blocks: int, topk: int) -> str | None:
    """Why the kernel's arrays do not fit on the chip, or None."""
    dim = pages.shape[-1]
    buffers = 2 * STEP_PAGES * BLOCK_SIZE * dim * pages.dtype.itemsize + device.step_bytes(dim)
    queries = 2 * LANES * dim * idx_q.dtype.itemsize
    vmem = buffers + queries + selection.vmem_bytes(num_blocks, topk)
    return device.unsupported_memory(vmem, 4 * (requests + num_blocks))


def select_blocks(
    queries: jax.Array,  # [R, 128, D], row h * query_len + j in lane order
    pages: jax.Array,  # [P, 128, D]
    block_table: jax.Array,  # [R, N]
    seq_lens: jax.Array,  # [R]
    *,
    width: int,
    query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    interpret,
) -> jax.Array:
    """Selected ids `[R, K padded to 8, 128]`, -1 past the visible blocks of each row."""
    requests, _, dim = queries.shape
    slots = selection.id_rows(topk)
    row = policy.ceil_div(width, LANES) * LANES
    table = jnp.pad(block_table[:, :width], ((0, 0), (0, row - width)))[:, None]  # [R, 1, row]
    kernel = functools.partial(
        _decode_kernel,
        width=width,
        query_len=query_len,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )
    out_shape = jax.ShapeDtypeStruct((requests, slots, LANES), jnp.int32)
    (out_shape,) = outputs_like((out_shape,), seq_lens, queries, pages, table)
    read = requests * width * BLOCK_SIZE * dim
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(requests,),
            in_specs=[
                pl.BlockSpec((1, LANES, dim), lambda r, lens: (r, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, slots, LANES), lambda r, lens: (r, 0, 0)),
            scratch_shapes=[
                pltpu.SMEM((1, row), jnp.int32),
                pltpu.VMEM((2, STEP_PAGES, BLOCK_SIZE, dim), pages.dtype),
                pltpu.VMEM((selection.key_rows(width), LANES), jnp.int32),
                pltpu.SemaphoreType.DMA((1,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=device.VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * read * LANES, bytes_accessed=read * pages.dtype.itemsize, transcendentals=0
        ),
        interpret=interpret,
        name="m3_decode",
    )(seq_lens, queries, pages, table)


def _decode_kernel(
    seq_lens_ref,  # [R], scalar memory
    q_ref,  # [1, 128, D]
    pages_ref,  # [P, 128, D], HBM
    table_ref,  # [R, 1, row], HBM
    ids_ref,  # [1, slots, 128]
    row_ref,  # [1, row], scalar memory
    buffer_ref,  # [2, pages, 128, D]
    keys_ref,  # [blocks, 128]
    row_sem,
    page_sems,
    *,
    width,
    query_len,
    topk,
    init_blocks,
    local_blocks,
):
    request = pl.program_id(0)
    dtype = rules.product_dtype(q_ref.dtype, pages_ref.dtype)
    seq_len = seq_lens_ref[request]
    last = rules.decode_positions(seq_len, jnp.int32(query_len - 1), query_len, width)
    num_blocks = rules.num_visible_blocks(rules.visible_tokens(last))
    steps = lax.div(num_blocks + (STEP_PAGES - 1), jnp.int32(STEP_PAGES))

    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    query = lax.rem(lane, jnp.int32(query_len))
    kv = rules.visible_tokens(rules.decode_positions(seq_len, query, query_len, width))  # [1, 128]
    row_blocks = rules.num_visible_blocks(kv)

    def copies(step, act):
        """Start or await the copies of a step's pages; those past the last block have none."""
        slot = lax.rem(step, jnp.int32(2))
        first = step * STEP_PAGES
        device.for_pages(
            pages_ref, lambda block: row_ref[0, block], first, num_blocks - first,
            buffer_ref.at[slot], page_sems.at[slot], act,
        )  # fmt: skip

    def score(step, carry):
        pl.when(step + 1 < steps)(lambda: copies(step + 1, lambda copy: copy.start()))
        copies(step, lambda copy: copy.wait())
        keys = buffer_ref[lax.rem(step, jnp.int32(2))].reshape(STEP_PAGES * BLOCK_SIZE, -1).astype(dtype)
        dots = lax.dot_general(
            keys,
            q_ref[0].astype(dtype),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )  # [pages * 128, 128]
        token = step * (STEP_PAGES * BLOCK_SIZE) + lax.broadcasted_iota(jnp.int32, dots.shape, 0)
        dots = jnp.where(token < kv, rules.clean_products(dots), -jnp.inf)
        maxima = jnp.max(dots.reshape(STEP_PAGES, BLOCK_SIZE, LANES), axis=1)  # [pages, 128]
        block = step * STEP_PAGES + lax.broadcasted_iota(jnp.int32, maxima.shape, 0)
        forced = rules.force_scores(maxima, block, row_blocks, init_blocks, local_blocks)
        first = pl.multiple_of(step * STEP_PAGES, STEP_PAGES)
        keys_ref[pl.ds(first, STEP_PAGES), :] = jnp.where(
            block < row_blocks, rules.order_key(forced), selection.HIDDEN_KEY
        )
        return carry

    def run():
        copy = pltpu.make_async_copy(table_ref.at[request], row_ref, row_sem.at[0])
        copy.start()
        copy.wait()
        copies(jnp.int32(0), lambda copy: copy.start())
        lax.fori_loop(jnp.int32(0), steps, score, None)

    pl.when(num_blocks > 0)(run)
    selection.select(ids_ref, keys_ref, num_blocks, row_blocks, topk)
