"""Decode selection kernel: the top K blocks of each row by the contract's total order, in one launch.

A program owns one chunk of one row's blocks and ranks every candidate against every other: its rank is the number of
candidates that beat it, so that no step waits for the one before. Ranking is quadratic, so a wide tile is narrowed
first: the K best blocks lie in the K groups of consecutive blocks whose best is highest. A row of one chunk is answered
directly; else each program leaves its winners in scratch and the last to arrive at the row's counter ranks them all and
resets the counter. The same program writes the page-16 row.

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
RANK_LANES = 64  # candidates that are ranked against each other at once
EAGER_TILE = 1024  # scores of up to this many blocks are loaded before the row's length is known
HIDDEN_KEY = -(2**31)  # below every order key
NO_BLOCK = 2**31 - 1  # above every block id


def unsupported_topk(topk: int) -> str | None:
    """Why the selection kernels cannot serve K `topk`, or None."""
    return f"topk {topk} is above {MAX_TOPK}; use None or 'xla'" if topk > MAX_TOPK else None


def decode_select(
    scored: jax.Array,  # [H, T, S] order keys
    seq_lens: jax.Array,  # [R]
    counter: jax.Array,  # [H, >=T], zeros
    out: jax.Array | None,  # [H, >=T, K]
    attention_block_table: jax.Array | None,  # [R, N']
    *,
    launch: policy.Selection,
    width: int,
    query_len: int,
    topk: int,
    block_page_stride: int | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Selected ids `[H, >=T, K]`, the counters, and the page-16 table `[T, K * 8]` with its lengths `[T]` if asked."""
    heads, tokens, _ = scored.shape
    slots = pl.next_power_of_2(topk)
    emit = attention_block_table is not None
    inputs = [scored, seq_lens, counter]
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
    block_page_stride,
    interpret,
):
    scored_ref, seq_lens_ref = refs[:2]
    attention_table_ref = refs[num_inputs - 1] if emit else None
    counter_ref, topk_ref, *rest = refs[num_inputs:]
    table_refs, partial_refs = (rest[:2], rest[2:]) if emit else ((), rest)
    chunks, tile = launch.num_chunks, launch.tile
    slots = pl.next_power_of_2(topk)

    pid = pl.program_id(0)
    flat, chunk = device.divmod_static(pid, chunks)
    head, row = device.divmod_static(flat, tokens)
    request, query = device.divmod_static(row, query_len)
    seq_len = plgpu.load(seq_lens_ref.at[request])
    position = rules.decode_positions(seq_len, query, query_len, width)
    num_blocks = rules.num_visible_blocks(rules.visible_tokens(position))
    active = jnp.clip(lax.div(num_blocks + (tile - 1), jnp.int32(tile)), 1, chunks)
    share = lax.div(num_blocks, active)
    extra = num_blocks - share * active
    first = chunk * share + jnp.minimum(chunk, extra)
    count = share + (chunk < extra).astype(jnp.int32)

    def load_keys(block):
        """Order keys of some blocks; hidden past this chunk."""
        inside = block < first + count
        there = block < width if chunks == 1 and tile <= EAGER_TILE else inside
        return jnp.where(inside, plgpu.load(scored_ref.at[head, row, block], mask=there, other=0), HIDDEN_KEY)

    def emit_row(ids):
        slot = lax.iota(jnp.int32, slots)
        ids = jnp.where(slot < jnp.minimum(topk, num_blocks), ids, -1)
        plgpu.store(topk_ref.at[head, row, slot], ids, mask=slot < topk)
        if emit:
            _store_table(table_refs, attention_table_ref, ids, row, request, position, topk, block_page_stride)

    def run():
        keys, ids = _top_of_blocks(load_keys, first, count, tile, slots, single_tile=launch.single_tile)
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
            # Every lane's winners are out before the one atomic that announces them. AMD's barrier waits for no store;
            # there one wave of 64 lanes both stores them and announces them.
            plgpu.debug_barrier()
        arrived = plgpu.atomic_add(counter_ref, (head, row), jnp.int32(1))

        def load_winners(lane):
            inside = lane < active * slots
            keys = plgpu.load(keys_ref.at[head, row, lane], mask=inside, other=HIDDEN_KEY, volatile=True)
            ids = plgpu.load(ids_ref.at[head, row, lane], mask=inside, other=0, volatile=True)
            return keys, jnp.where(inside, ids, NO_BLOCK - lane)

        def merge(num_chunks):
            keys, ids = load_winners(lax.iota(jnp.int32, num_chunks * slots))

            def count_better(i, rank):
                other_keys, other_ids = load_winners(i * slots + lax.iota(jnp.int32, slots))
                return rank + num_better(keys, ids, other_keys, other_ids)

            rank = lax.fori_loop(jnp.int32(0), active, count_better, jnp.zeros_like(ids))
            emit_row(_take(rank, ids, slots))
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


def beats(key, block, other_key, other_block):
    """One comparison a pair, and one for ties: order keys end well below the largest int32."""
    return key + (block < other_block).astype(jnp.int32) > other_key


def _take(rank, values, slots):
    """The values of ranks 0 .. `slots` - 1, in rank order."""
    chosen = rank[:, None] == lax.iota(jnp.int32, slots)[None, :]  # [n, slots]
    return jnp.sum(jnp.where(chosen, values[:, None], 0), axis=0, dtype=jnp.int32)


def _ranks(keys, blocks):
    """How many candidates beat each: a permutation, as the blocks are distinct."""
    return num_better(keys, blocks, keys, blocks)


def num_better(keys, blocks, other_keys, other_blocks):
    """How many of the others beat each. Sums run down axis 0, where a thread holds most of a column."""
    better = beats(other_keys[:, None], other_blocks[:, None], keys[None, :], blocks[None, :])  # [others, n]
    return jnp.sum(better, axis=0, dtype=jnp.int32)


def _top_of_tile(load_keys, first, tile, slots):
    """Order keys and ids of the best `slots` of the blocks `first` .. `first + tile - 1`, best first."""
    lanes = max(RANK_LANES, 2 * slots)
    size = max(tile // lanes, 1)
    starts = first + size * lax.iota(jnp.int32, tile // size)
    while size > 1:
        # Groups hold consecutive blocks, so equal bests go to the group that starts lower.
        keys = jnp.max(load_keys(starts[:, None] + lax.iota(jnp.int32, size)[None, :]), axis=1)
        starts = _take(_ranks(keys, starts), starts, slots)
        part = max(slots * size // lanes, 1)
        offsets = part * lax.iota(jnp.int32, size // part)
        starts = (starts[:, None] + offsets[None, :]).reshape(slots * size // part)
        size = part
    keys = load_keys(starts)
    rank = _ranks(keys, starts)
    return _take(rank, keys, slots), _take(rank, starts, slots)


def _top_of_blocks(load_keys, first, count, tile, slots, *, single_tile):
    """Order keys and ids of the best `slots` of `count` blocks from `first`, best first, a tile at a time.

    `load_keys` takes block ids of any shape and gives their keys, `HIDDEN_KEY` past the last block.
    """
    best = _top_of_tile(load_keys, first, tile, slots)
    if single_tile:
        return best
    return lax.fori_loop(
        jnp.int32(1),
        lax.div(count + (tile - 1), jnp.int32(tile)),
        lambda i, best: _merge_sorted(best, _top_of_tile(load_keys, first + i * tile, tile, slots), slots),
        best,
    )


def _merge_sorted(left, right, slots):
    """The best `slots` of two lists of (order keys, ids), each best first."""
    slot = lax.iota(jnp.int32, slots)
    ranked = []
    for (keys, ids), (other_keys, other_ids) in ((left, right), (right, left)):
        ranked.append((slot + num_better(keys, ids, other_keys, other_ids), keys, ids))
    return tuple(sum(_take(entry[0], entry[i], slots) for entry in ranked) for i in (1, 2))


def _store_table(table_refs, attention_table_ref, ids, row, request, position, topk, stride):
    table_ref, lens_ref = table_refs
    width = attention_table_ref.shape[1]
    kept, slot, length = rules.table_slots(ids, position, width)
    page = plgpu.load(attention_table_ref.at[request, jnp.clip(ids, 0, width - 1)], mask=kept, other=0) * stride
    lane = lax.iota(jnp.int32, rules.PAGES_PER_BLOCK)[None, :]
    pages = jnp.where(kept[:, None], page[:, None] + lane, 0)  # [slots, 8]
    inside = (slot < topk)[:, None] & (lane >= 0)
    plgpu.store(table_ref.at[row, slot[:, None] * rules.PAGES_PER_BLOCK + lane], pages, mask=inside)
    plgpu.store(lens_ref.at[row], length)
