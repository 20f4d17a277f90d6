"""Decode selection kernel: the top K blocks of each row by the contract's total order, in one launch.

A program owns one chunk of one row's blocks. It keeps a tile's order keys in registers and takes the best K times:
the maximum of the keys, then the lowest id that has it. Two integer reductions a round are two instructions where a
warp holds the row. A row of one chunk is answered directly; else each program leaves its winners in scratch and the
last to arrive at the row's counter ranks them all and resets the counter. The same program writes the page-16 row.

Limits: K up to 64; the counters are zero when the kernel starts (the score kernel zeroes them).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from m3_pallas import policy, rules
from m3_pallas.triton import device
from m3_pallas.triton.device import plgpu

MAX_TOPK = 64
HIDDEN_KEY = -(2**31)  # below every order key
NO_BLOCK = 2**31 - 1  # above every block id


def decode_select(
    score: jax.Array,  # [H, T, S]
    seq_lens: jax.Array,  # [R]
    counter: jax.Array,  # [H, >=T], zeros
    out: jax.Array | None,  # [H, >=T, K]
    attention_block_table: jax.Array | None,  # [R, N']
    *,
    launch: policy.Selection,
    width: int,
    query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    block_page_stride: int | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Selected ids `[H, >=T, K]`, the counters, and the page-16 table `[T, K * 8]` with its lengths `[T]` if asked."""
    heads, tokens, _ = score.shape
    slots = pl.next_power_of_2(topk)
    emit = attention_block_table is not None
    inputs = [score, seq_lens, counter]
    outputs = [jax.ShapeDtypeStruct(counter.shape, jnp.int32)]
    aliases = {2: 0}
    if out is not None:
        aliases[len(inputs)] = len(outputs)
        inputs.append(out)
    outputs.append(jax.ShapeDtypeStruct((heads, tokens, topk) if out is None else out.shape, jnp.int32))
    if emit:
        inputs.append(attention_block_table)
        outputs.append(jax.ShapeDtypeStruct((tokens, topk * rules.PAGES_PER_BLOCK), jnp.int32))
        outputs.append(jax.ShapeDtypeStruct((tokens,), jnp.int32))
    if launch.num_chunks > 1:
        partial = jax.ShapeDtypeStruct((heads, tokens, launch.num_chunks * slots), jnp.int32)
        outputs += [partial, partial]  # order keys and ids
    kernel = functools.partial(
        _select_kernel,
        launch=launch,
        num_inputs=len(inputs),
        emit=emit,
        tokens=tokens,
        width=width,
        query_len=query_len,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        block_page_stride=block_page_stride,
        interpret=interpret,
    )
    results = device.call(
        kernel,
        name="m3_decode_select",
        grid=tokens * heads * launch.num_chunks,
        out_shape=outputs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        aliases=aliases,
        interpret=interpret,
    )(*inputs)
    table, lens = results[2:4] if emit else (None, None)
    return results[1], results[0], table, lens


def _select_kernel(
    *refs,
    launch,
    num_inputs,
    emit,
    tokens,
    width,
    query_len,
    topk,
    init_blocks,
    local_blocks,
    block_page_stride,
    interpret,
):
    score_ref, seq_lens_ref = refs[:2]
    attention_table_ref = refs[num_inputs - 1] if emit else None
    counter_ref, topk_ref, *rest = refs[num_inputs:]
    table_refs, partial_refs = (rest[:2], rest[2:]) if emit else ((), rest)
    chunks, tile = launch.num_chunks, launch.tile
    slots = pl.next_power_of_2(topk)

    pid = pl.program_id(0)
    flat, chunk = _divmod(pid, chunks)
    head, row = _divmod(flat, tokens)
    request, query = _divmod(row, query_len)
    seq_len = plgpu.load(seq_lens_ref.at[request])
    position = rules.decode_positions(seq_len, query, query_len, width)
    num_blocks = rules.num_visible_blocks(rules.visible_tokens(position))
    active = jnp.clip(lax.div(num_blocks + (tile - 1), jnp.int32(tile)), 1, chunks)
    share = lax.div(num_blocks, active)
    extra = num_blocks - share * active
    first = chunk * share + jnp.minimum(chunk, extra)
    count = share + (chunk < extra).astype(jnp.int32)

    def load_scores(lane):
        """Order keys and ids of blocks `first + lane` of this chunk."""
        block = first + lane
        inside = lane < count
        # A lone chunk starts at 0: its scores load beside the length, and what lies past the row is hidden below.
        there = block < width if chunks == 1 else inside
        score = plgpu.load(score_ref.at[head, row, block], mask=there, other=0)
        score = rules.force_scores(score, block, num_blocks, init_blocks, local_blocks)
        return jnp.where(inside, rules.order_key(score), HIDDEN_KEY), block

    def emit_row(ids):
        slot = lax.iota(jnp.int32, slots)
        ids = jnp.where(slot < jnp.minimum(topk, num_blocks), ids, -1)
        plgpu.store(topk_ref.at[head, row, slot], ids, mask=slot < topk)
        if emit:
            _store_table(*table_refs, attention_table_ref, ids, row, request, position, topk, block_page_stride)

    def run():
        keys, ids = _top_of_chunk(load_scores, count, tile, topk, slots, single_tile=launch.single_tile)
        if chunks == 1:
            emit_row(ids)
            return
        pl.when(active == 1)(lambda: emit_row(ids))
        pl.when(active > 1)(lambda: leave_and_merge(keys, ids))

    def leave_and_merge(keys, ids):
        keys_ref, ids_ref = partial_refs
        place = chunk * slots + lax.iota(jnp.int32, slots)
        plgpu.store(keys_ref.at[head, row, place], keys)
        plgpu.store(ids_ref.at[head, row, place], ids)
        if not interpret:  # one lane at a time, and no rule for barriers
            plgpu.debug_barrier()  # every lane's winners are out before the one atomic that announces them
        arrived = plgpu.atomic_add(counter_ref, (head, row), jnp.int32(1))

        def load_winners(lane):
            inside = lane < active * slots
            keys = plgpu.load(keys_ref.at[head, row, lane], mask=inside, other=HIDDEN_KEY, volatile=True)
            ids = plgpu.load(ids_ref.at[head, row, lane], mask=inside, other=-1, volatile=True)
            return keys, ids

        def merge(num_chunks):
            winners = load_winners(lax.iota(jnp.int32, num_chunks * slots))
            emit_row(_top_of_tiles([winners], jnp.minimum(topk, num_blocks), slots)[1])
            plgpu.store(counter_ref.at[head, row], jnp.int32(0))

        def merge_last():
            if not launch.adaptive_merge:
                merge(chunks)
                return
            widths = [2**i for i in range(1, int(math.log2(chunks)) + 1)]
            for narrower, merged in zip([1, *widths], widths, strict=False):
                pl.when((active > narrower) & (active <= merged))(functools.partial(merge, merged))

        pl.when(arrived == active - 1)(merge_last)

    if chunks == 1:
        run()
    else:
        pl.when(chunk < active)(run)


def _divmod(value, divisor: int):
    """Quotient and remainder of a non-negative traced int by a static one; Triton cannot lower a division by 1."""
    if divisor == 1:
        return value, jnp.int32(0)
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def _top_of_tiles(tiles, rounds, slots):
    """Order keys and ids of the best `rounds` lanes of some tiles of (keys, ids), best first, in `slots` lanes."""
    slot = lax.iota(jnp.int32, slots)
    ids_of = [ids for _, ids in tiles]

    def take(i, carry):
        keys_of, best_keys, best_ids = carry
        key = functools.reduce(jnp.maximum, [jnp.max(keys) for keys in keys_of])
        lowest = [jnp.min(jnp.where(keys == key, ids, NO_BLOCK)) for keys, ids in zip(keys_of, ids_of, strict=True)]
        block = functools.reduce(jnp.minimum, lowest)
        keys_of = tuple(
            jnp.where((keys == key) & (ids == block), HIDDEN_KEY, keys)
            for keys, ids in zip(keys_of, ids_of, strict=True)
        )
        return keys_of, jnp.where(slot == i, key, best_keys), jnp.where(slot == i, block, best_ids)

    start = (tuple(keys for keys, _ in tiles), jnp.full(slots, HIDDEN_KEY, jnp.int32), jnp.full(slots, -1, jnp.int32))
    return lax.fori_loop(jnp.int32(0), rounds, take, start)[1:]


def _top_of_chunk(load, count, tile, topk, slots, *, single_tile):
    """Order keys and ids of the best K of a chunk of `count` blocks, best first."""
    lane = lax.iota(jnp.int32, tile)
    rounds = jnp.minimum(topk, count)
    best = _top_of_tiles([load(lane)], rounds, slots)
    if single_tile:
        return best
    tiles = lax.div(count + (tile - 1), jnp.int32(tile))
    return lax.fori_loop(
        jnp.int32(1), tiles, lambda i, best: _top_of_tiles([load(i * tile + lane), best], rounds, slots), best
    )


def _store_table(table_ref, lens_ref, attention_table_ref, ids, row, request, position, topk, stride):
    width = attention_table_ref.shape[1]
    kept, slot, length = rules.table_slots(ids, position, width)
    page = plgpu.load(attention_table_ref.at[request, jnp.clip(ids, 0, width - 1)], mask=kept, other=0) * stride
    lane = lax.iota(jnp.int32, rules.PAGES_PER_BLOCK)[None, :]
    pages = jnp.where(kept[:, None], page[:, None] + lane, 0)  # [slots, 8]
    inside = (slot < topk)[:, None] & (lane >= 0)
    plgpu.store(table_ref.at[row, slot[:, None] * rules.PAGES_PER_BLOCK + lane], pages, mask=inside)
    plgpu.store(lens_ref.at[row], length)
