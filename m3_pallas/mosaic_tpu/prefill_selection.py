"""Prefill selection kernel: 128 rows of a head at a time; scores are turned, blocks to sublanes, as they arrive.

Chunks of blocks past what a tile's rows see are neither read nor turned, and a selection pass stops there.

Limit: the blocks of `selection`.
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
from m3_pallas.mosaic_tpu.device import LANES

CHUNK = selection.PASS_BLOCKS  # blocks that arrive at once: the order keys' rows are a multiple of them


def unsupported(score: jax.Array, topk: int) -> str | None:
    """Why the kernel's arrays do not fit on the chip, or None."""
    _, tokens, width = score.shape
    vmem = selection.vmem_bytes(width, topk) + 3 * LANES * CHUNK * 4
    return device.unsupported_memory(vmem, 4 * policy.ceil_div(tokens, LANES))


def prefill_select(
    score: jax.Array,  # [H, T, S]
    num_blocks: jax.Array,  # [T], blocks each row sees, at most S
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    interpret: bool,
) -> jax.Array:
    """Selected ids `[H, T, K]`, -1 past the visible blocks of each row."""
    heads, tokens, width = score.shape
    tiles = policy.ceil_div(tokens, LANES)
    slots = selection.id_rows(topk)
    chunks = policy.ceil_div(width, CHUNK)
    # A tile larger than its array would not compile.
    score = jnp.pad(
        score,
        ((0, 0), (0, max(LANES - tokens, 0)), (0, max(CHUNK - width, 0))),
    )
    row_blocks = jnp.pad(num_blocks, (0, tiles * LANES - tokens)).reshape(tiles, 1, LANES)
    tile_blocks = jnp.max(row_blocks, axis=(1, 2))
    out_shape = jax.ShapeDtypeStruct((heads, slots, tiles * LANES), jnp.int32)
    (out_shape,) = outputs_like((out_shape,), score, num_blocks)

    def arriving(h, t, c, blocks):
        """Past the last visible chunk the same one again: no new copy."""
        return h, t, jnp.minimum(c, lax.div(jnp.maximum(blocks[t] - 1, 0), jnp.int32(CHUNK)))

    ids = pl.pallas_call(
        functools.partial(_select_kernel, topk=topk, init_blocks=init_blocks, local_blocks=local_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, tiles, chunks),
            in_specs=[
                pl.BlockSpec((1, LANES, CHUNK), arriving),
                pl.BlockSpec((1, 1, LANES), lambda h, t, c, blocks: (t, 0, 0)),
            ],
            out_specs=pl.BlockSpec((1, slots, LANES), lambda h, t, c, blocks: (h, 0, t)),
            scratch_shapes=[pltpu.VMEM((selection.key_rows(width), LANES), jnp.int32)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=device.VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=8 * topk * heads * tokens * width, bytes_accessed=heads * tokens * width * 4, transcendentals=0
        ),
        interpret=device.interpret_params(interpret),
        name="m3_prefill_select",
    )(tile_blocks, score, row_blocks)
    return ids[:, :topk, :tokens].transpose(0, 2, 1)


def _select_kernel(
    tile_blocks_ref,  # [tiles], scalar memory
    score_ref,  # [1, 128, chunk]
    row_blocks_ref,  # [1, 1, 128]
    ids_ref,  # [1, slots, 128]
    keys_ref,  # [blocks, 128]
    *,
    topk,
    init_blocks,
    local_blocks,
):
    tile, chunk = pl.program_id(1), pl.program_id(2)
    num_blocks = tile_blocks_ref[tile]
    row_blocks = row_blocks_ref[0]  # [1, 128]

    @pl.when(chunk * CHUNK < num_blocks)
    def _():
        block = chunk * CHUNK + lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 0)
        forced = rules.force_scores(score_ref[0].T, block, row_blocks, init_blocks, local_blocks)
        keys_ref[pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK), :] = rules.order_key(forced)

    @pl.when(chunk == pl.num_programs(2) - 1)
    def _():
        selection.select(ids_ref, keys_ref, num_blocks, row_blocks, topk)
