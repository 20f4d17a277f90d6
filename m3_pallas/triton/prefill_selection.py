"""Prefill selection kernel: the top K blocks of each row by the contract's total order, in one launch.

A program owns one row of one head. It takes the narrowest of a few tiles that holds the blocks its row sees, so that
short rows do not pay for long ones, and ranks it as decode's selection does; rows beyond the widest tile are taken
tile by tile.

Limits: K up to 64.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from m3_pallas import policy, rules
from m3_pallas.triton import device
from m3_pallas.triton.device import plgpu
from m3_pallas.triton.selection import HIDDEN_KEY, top_of_blocks

TILE_STEP = 4  # each tile is so many times the one below


def prefill_select(
    score: jax.Array,  # [H, T, S]
    cu_seqlens_q: jax.Array,  # [R + 1]
    prefix_lens: jax.Array,  # [R]
    out: jax.Array | None,  # [H, >=T, K]
    *,
    launch: policy.Selection,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    interpret: bool,
) -> jax.Array:
    """Selected ids `[H, >=T, K]`."""
    heads, tokens, _ = score.shape
    (ids,) = device.call(
        functools.partial(
            _select_kernel,
            launch=launch,
            topk=topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            has_out=out is not None,
        ),
        name="m3_prefill_select",
        grid=heads * tokens,
        out_shape=(jax.ShapeDtypeStruct((heads, tokens, topk) if out is None else out.shape, jnp.int32),),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        aliases={} if out is None else {3: 0},
        interpret=interpret,
    )(score, cu_seqlens_q, prefix_lens, *(() if out is None else (out,)))
    return ids


def _select_kernel(
    score_ref, starts_ref, prefix_ref, *refs, launch, topk, init_blocks, local_blocks, has_out
):  # [H, T, S], [R + 1], [R], [H, >=T, K]
    topk_ref = refs[has_out]
    _, tokens, width = score_ref.shape
    slots = pl.next_power_of_2(topk)
    head, row = device.divmod_static(pl.program_id(0), tokens)
    num_blocks = jnp.minimum(rules.num_visible_blocks(_position(starts_ref, prefix_ref, row, tokens) + 1), width)

    def load_keys(block):
        inside = block < num_blocks
        score = plgpu.load(score_ref.at[head, row, block], mask=inside, other=0.0)
        score = rules.force_scores(score, block, num_blocks, init_blocks, local_blocks)
        return jnp.where(inside, rules.order_key(score), HIDDEN_KEY)

    def select(tile):
        ids = top_of_blocks(load_keys, jnp.int32(0), num_blocks, tile, slots, single_tile=num_tiles(tile) == 1)[1]
        slot = lax.iota(jnp.int32, slots)
        ids = jnp.where(slot < jnp.minimum(topk, num_blocks), ids, -1)
        plgpu.store(topk_ref.at[head, row, slot], ids, mask=slot < topk)

    def num_tiles(tile):
        return policy.ceil_div(width, tile) if tile == tiles[-1] else 1

    tiles = [max(64, slots)]
    while tiles[-1] < min(launch.tile, width):
        tiles.append(min(tiles[-1] * TILE_STEP, launch.tile))
    for narrower, tile in zip([-1, *tiles], tiles, strict=False):
        fits = (num_blocks > narrower) & ((num_blocks <= tile) | (tile == tiles[-1]))
        pl.when(fits)(functools.partial(select, tile))


def _position(starts_ref, prefix_ref, row, tokens):
    """Position of a row, -1 for rows past the last request: `rules.prefill_rows` for one row."""
    requests = prefix_ref.shape[0]
    lane = lax.iota(jnp.int32, pl.next_power_of_2(requests))
    ends = plgpu.load(starts_ref.at[jnp.minimum(lane + 1, requests)])
    passed = jnp.sum((ends <= row) & (lane < requests), dtype=jnp.int32)
    request = jnp.minimum(passed, requests - 1)
    offset = row - plgpu.load(starts_ref.at[request])
    owned = (passed == request) & (offset >= 0) & (offset < tokens)
    return jnp.where(owned, rules.clip_position(plgpu.load(prefix_ref.at[request])) + offset, -1)
