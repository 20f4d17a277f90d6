"""Prefill selection kernel: the top K blocks of each row by the contract's total order, in one launch.

A program owns one row of one head. Rows are many, so what counts is instructions, and registers, which decide how many
rows run at once. Ranking is quadratic, so few candidates are ranked: the blocks are dealt to groups, one a lane, at
least twice as many as K. The K-th best of the groups' best scores is a bound that K blocks reach. A second pass leaves
those that reach it, 1.4 K on average, in scratch, where each is ranked against all. Where more reach it than scratch
holds, because scores are equal or NaN or the best blocks share few groups, the best are taken one by one instead. Rows
of few blocks are ranked at once, and no row pays for a longer one.

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
from m3_pallas.triton.selection import HIDDEN_KEY, NO_BLOCK, beats, num_better

VECTOR = 4  # consecutive blocks that a lane loads at once


def prefill_select(
    score: jax.Array,  # [H, T, S]
    cu_seqlens_q: jax.Array,  # [R + 1]
    prefix_lens: jax.Array,  # [R]
    out: jax.Array | None,  # [H, >=T, K]
    *,
    launch: policy.TopkLaunch,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    interpret: bool,
) -> jax.Array:
    """Selected ids `[H, >=T, K]`."""
    heads, tokens, width = score.shape
    candidates = policy.topk_candidates(launch.groups, topk)
    outputs = [jax.ShapeDtypeStruct((heads, tokens, topk) if out is None else out.shape, jnp.int32)]
    if width > candidates:
        outputs.append(jax.ShapeDtypeStruct((heads, tokens, candidates), jnp.int32))
    ids, *_ = device.call(
        functools.partial(
            _select_kernel,
            tile=launch.tile,
            rivals=launch.groups,  # that candidates are compared with at once: more take registers other rows need
            candidates=candidates,
            topk=topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            num_inputs=3 + (out is not None),
            interpret=interpret,
        ),
        name="m3_prefill_select",
        grid=heads * tokens,
        out_shape=outputs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        aliases={} if out is None else {3: 0},
        interpret=interpret,
    )(score, cu_seqlens_q, prefix_lens, *(() if out is None else (out,)))
    return ids


def _select_kernel(
    score_ref, starts_ref, prefix_ref, *refs,
    tile, rivals, candidates, topk, init_blocks, local_blocks, num_inputs, interpret,
):  # fmt: skip  # [H, T, S], [R + 1], [R], [H, >=T, K], [H, T, candidates]
    topk_ref, *found_refs = refs[num_inputs - 3 :]
    _, tokens, width = score_ref.shape
    head, row = device.divmod_static(pl.program_id(0), tokens)
    num_blocks = jnp.minimum(rules.num_visible_blocks(_position(starts_ref, prefix_ref, row, tokens) + 1), width)
    groups = candidates // 2
    lane = lax.iota(jnp.int32, groups)
    offset = VECTOR * lane[None, :] + lax.iota(jnp.int32, VECTOR)[:, None]  # [VECTOR, groups]
    parts = max(tile // (VECTOR * groups), 1)
    chunk = parts * VECTOR * groups
    steps = lax.div(num_blocks + (chunk - 1), jnp.int32(chunk))
    plain_blocks = 0 if init_blocks else jnp.maximum(num_blocks - min(local_blocks, width), 0)
    plain_steps = lax.div(jnp.int32(plain_blocks), jnp.int32(chunk))  # where every block is seen and none is forced

    def blocks_of(step):
        return [step * chunk + i * VECTOR * groups + offset for i in range(parts)]

    def load(block):
        """Scores with forced values of some blocks, and which of them the row sees."""
        inside = block < num_blocks
        score = plgpu.load(score_ref.at[head, row, block], mask=inside, other=-jnp.inf)
        return rules.force_scores(score, block, num_blocks, init_blocks, local_blocks), inside

    def load_plain(block):
        return plgpu.load(score_ref.at[head, row, block]), True

    def load_keys(block):
        score, inside = load(block)
        return jnp.where(inside, rules.order_key(score), HIDDEN_KEY)

    def pass_over_row(step, start):
        """`step(load, blocks, carry)` over the row's chunks."""
        carry = lax.fori_loop(jnp.int32(0), plain_steps, lambda i, c: step(load_plain, blocks_of(i), c), start)
        return lax.fori_loop(plain_steps, steps, lambda i, c: step(load, blocks_of(i), c), carry)

    def best_of_groups(load, blocks, best):
        # Maximum and minimum both skip NaN compiled and both keep it interpreted: either way the bound is low enough.
        scores = [load(part)[0] for part in blocks]
        return jnp.maximum(best, jnp.max(functools.reduce(jnp.maximum, scores), axis=0))

    def narrow():
        best = pass_over_row(best_of_groups, jnp.full((groups,), -jnp.inf, jnp.float32))

        def count_higher(i, higher):
            of_part = lax.iota(jnp.int32, groups // rivals)[:, None] == i
            part = jnp.sum(jnp.where(of_part, best.reshape(groups // rivals, rivals), 0), axis=0)
            return higher + jnp.sum(part[:, None] > best[None, :], axis=0, dtype=jnp.int32)

        higher = lax.fori_loop(jnp.int32(0), jnp.int32(groups // rivals), count_higher, jnp.zeros_like(lane))
        bound = jnp.min(jnp.where(higher < topk, best, jnp.inf))

        def collect(load, blocks, count):
            reach = [~(score < bound) & inside for score, inside in map(load, blocks)]  # NaN reaches
            of_part = [jnp.sum(part, axis=0, dtype=jnp.int32) for part in reach]  # [groups] each
            of_group = sum(of_part)
            first = count + jnp.cumsum(of_group, dtype=jnp.int32) - of_group
            for part, found, number in zip(blocks, reach, of_part, strict=True):
                place = first[None, :] + jnp.cumsum(found.astype(jnp.int32), axis=0, dtype=jnp.int32) - 1
                fits = found & (place < candidates)
                if interpret:  # masked lanes write back what they read: elsewhere
                    place = jnp.where(fits, place, candidates)
                plgpu.store(found_refs[0].at[head, row, place], part, mask=fits)
                first += number
            return count + jnp.sum(of_group, dtype=jnp.int32)

        count = pass_over_row(collect, jnp.int32(0))

        def load_found(lane):
            block = plgpu.load(found_refs[0].at[head, row, lane], mask=lane < count, other=0, volatile=True)
            return jnp.where(lane < count, block, NO_BLOCK - lane)

        if not interpret:  # one lane at a time, and no rule for barriers
            plgpu.debug_barrier()  # every lane's candidates are out (AMD: in order, by the one L1 of a program's waves)
        pl.when(count <= groups)(lambda: rank(load_found, groups))
        pl.when((count > groups) & (count <= candidates))(lambda: rank(load_found, candidates))
        pl.when(count > candidates)(one_by_one)

    def rank(load_ids, lanes):
        """Rank `lanes` candidates and store the best; rows of fewer than K blocks end in -1."""
        ids = load_ids(lax.iota(jnp.int32, lanes))
        keys = load_keys(ids)

        def count_better(i, place):
            others = load_ids(i * rivals + lax.iota(jnp.int32, rivals))
            return place + num_better(keys, ids, load_keys(others), others)

        place = lax.fori_loop(jnp.int32(0), jnp.int32(lanes // rivals), count_better, jnp.zeros_like(ids))
        plgpu.store(topk_ref.at[head, row, place], jnp.where(place < num_blocks, ids, -1), mask=place < topk)

    def one_by_one():
        def best_below(above, blocks, best):
            for part in blocks:
                keys = load_keys(part)
                keys = jnp.where(beats(above[0], above[1], keys, part), keys, HIDDEN_KEY)
                key = jnp.max(keys, axis=0)
                block = jnp.min(jnp.where(keys == key[None, :], part, NO_BLOCK), axis=0)
                better = key > best[0]
                best = jnp.where(better, key, best[0]), jnp.where(better, block, best[1])
            return best

        def step(slot, above):
            start = jnp.full((groups,), HIDDEN_KEY, jnp.int32)
            keys, ids = lax.fori_loop(
                jnp.int32(0), steps, lambda i, best: best_below(above, blocks_of(i), best), (start, start)
            )
            key = jnp.max(keys)
            block = jnp.min(jnp.where(keys == key, ids, NO_BLOCK))
            plgpu.store(topk_ref.at[head, row, slot], block)
            return key, block

        lax.fori_loop(jnp.int32(0), jnp.int32(topk), step, (jnp.int32(NO_BLOCK), jnp.int32(NO_BLOCK)))

    pl.when(num_blocks <= groups)(lambda: rank(lambda lane: lane, groups))
    if width > groups:
        pl.when((num_blocks > groups) & (num_blocks <= candidates))(lambda: rank(lambda lane: lane, candidates))
    if width > candidates:
        pl.when(num_blocks > candidates)(narrow)


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
