"""Decode score kernels: the order keys of every visible block, in one pass over the pages.

A program owns some consecutive blocks of one request. It loads the request's query rows once, `[columns, D]` with one
column per (head, query token), then reads each page once and scores it for all of them. What it writes is the order key
of the forced score, which is all that the selection needs. The split launch cuts every request into the same number of
chunks; the balanced launch deals all blocks of all requests to a fixed number of programs, found from the lengths by
each program itself. The first program of a request also zeroes the selection's counters, so that a selection never
depends on what an earlier call left there.

Limits: D a power of two from 16; heads and query lengths are padded to powers of two and masked.
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


def decode_score(
    idx_q: jax.Array,  # [T, H, D]
    pages: jax.Array,  # [P, 128, D]
    block_table: jax.Array,  # [R, N]
    seq_lens: jax.Array,  # [R]
    counter: jax.Array | None,  # [H, >=T]
    *,
    launch: policy.BalancedScore | policy.SplitScore,
    width: int,
    query_len: int,
    max_query_len: int,
    init_blocks: int,
    local_blocks: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Order keys `[H, T, S]` int32 of the visible blocks, the rest unwritten, and the counters `[H, >=T]`, zeroed."""
    tokens, heads, _ = idx_q.shape
    requests = seq_lens.shape[0]
    balanced = isinstance(launch, policy.BalancedScore)
    statics = dict(width=width, query_len=query_len, max_query_len=max_query_len)
    kernel = functools.partial(
        _balanced_kernel if balanced else _split_kernel,
        split=launch.budget if balanced else launch.num_chunks,
        has_counter=counter is not None,
        score_blocks=functools.partial(
            _score_blocks,
            min_columns=launch.min_columns,
            tile_tokens=launch.tile_tokens,
            one_block=not balanced and width <= launch.num_chunks,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            **statics,
        ),
        **statics,
    )
    counter_shape = (heads, tokens) if counter is None else counter.shape
    keys, zeros = device.call(
        kernel,
        name="m3_decode_score_balanced" if balanced else "m3_decode_score_split",
        grid=policy.balanced_grid(launch.budget, requests) if balanced else requests * launch.num_chunks,
        out_shape=(
            jax.ShapeDtypeStruct((heads, tokens, policy.ceil_div(width, 16) * 16), jnp.int32),
            jax.ShapeDtypeStruct(counter_shape, jnp.int32),
        ),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        aliases={} if counter is None else {4: 1},
        interpret=interpret,
    )(idx_q, pages, block_table, seq_lens, *(() if counter is None else (counter,)))
    return keys, zeros


def _split_kernel(
    q_ref, pages_ref, table_ref, seq_lens_ref, *refs,
    split, has_counter, score_blocks, width, query_len, max_query_len,
):  # fmt: skip
    keys_ref, counter_ref = refs[has_counter:]
    pid = pl.program_id(0)
    request, chunk = device.divmod_static(pid, split)
    seq_len = plgpu.load(seq_lens_ref.at[request])
    num_blocks = _num_blocks(seq_len, query_len, width)
    # One block each where the table is narrow enough: its page is then looked up beside the length.
    size = jnp.int32(1) if width <= split else device.divmod_static(num_blocks + (split - 1), split)[0]
    pl.when(chunk == 0)(lambda: _zero_counters(counter_ref, request, q_ref, query_len, max_query_len))
    score_blocks(q_ref, pages_ref, table_ref, keys_ref, request, seq_len, chunk * size, num_blocks, size)


def _balanced_kernel(
    q_ref, pages_ref, table_ref, seq_lens_ref, *refs,
    split, has_counter, score_blocks, width, query_len, max_query_len,
):  # fmt: skip
    keys_ref, counter_ref = refs[has_counter:]
    pid = pl.program_id(0)
    requests = seq_lens_ref.shape[0]
    lane = lax.iota(jnp.int32, pl.next_power_of_2(requests))
    seq_lens = plgpu.load(seq_lens_ref.at[lane], mask=lane < requests, other=0)
    num_blocks = _num_blocks(seq_lens, query_len, width)
    share = jnp.maximum(1, lax.div(jnp.sum(num_blocks, dtype=jnp.int32) + (split - 1), jnp.int32(split)))
    programs = lax.div(num_blocks + share - 1, share)
    ends = jnp.cumsum(programs, dtype=jnp.int32)
    done = ends <= pid
    request = jnp.sum(done & (lane < requests), dtype=jnp.int32)
    local = pid - jnp.sum(jnp.where(done, programs, 0), dtype=jnp.int32)
    # Programs past the last own nothing: their request is R and its length 0.
    seq_len = jnp.sum(jnp.where(lane == request, seq_lens, 0), dtype=jnp.int32)
    own_blocks = jnp.sum(jnp.where(lane == request, num_blocks, 0), dtype=jnp.int32)
    pl.when(pid < requests)(lambda: _zero_counters(counter_ref, pid, q_ref, query_len, max_query_len))
    score_blocks(q_ref, pages_ref, table_ref, keys_ref, request, seq_len, local * share, own_blocks, share)


def _num_blocks(seq_len, query_len, width):
    """Blocks the last query token of a request sees."""
    last = rules.decode_positions(seq_len, jnp.int32(query_len - 1), query_len, width)
    return rules.num_visible_blocks(rules.visible_tokens(last))


def _columns(heads, max_query_len, min_columns=1):
    """Head and query token of each column: `[columns]` each."""
    queries = pl.next_power_of_2(max_query_len)
    column = lax.iota(jnp.int32, max(pl.next_power_of_2(heads) * queries, min_columns))
    return column >> int(math.log2(queries)), column & (queries - 1)


def _zero_counters(counter_ref, request, q_ref, query_len, max_query_len):
    heads = q_ref.shape[1]
    head, query = _columns(heads, max_query_len)
    mask = (head < heads) & (query < query_len)
    plgpu.store(counter_ref.at[head, request * query_len + query], jnp.zeros_like(head), mask=mask)


def _score_blocks(
    q_ref,  # [T, H, D]
    pages_ref,  # [P, 128, D]
    table_ref,  # [R, N]
    keys_ref,  # [H, T, S]
    request,
    seq_len,
    first,
    num_blocks,
    size,
    *,
    width,
    query_len,
    max_query_len,
    min_columns,
    tile_tokens,
    one_block,
    init_blocks,
    local_blocks,
):
    """Score up to `size` blocks of a request, from `first`, of the `num_blocks` its last query token sees."""
    _, heads, dim = q_ref.shape
    num_pages = pages_ref.shape[0]
    dtype = rules.product_dtype(q_ref.dtype, pages_ref.dtype, both_float8=jnp.float16)
    end = jnp.minimum(first + size, num_blocks)

    def score_all():
        head, query = _columns(heads, max_query_len, min_columns)  # [columns]
        row = request * query_len + query
        real = (head < heads) & (query < query_len)
        kv = rules.visible_tokens(rules.decode_positions(seq_len, query, query_len, width))
        row_blocks = rules.num_visible_blocks(kv)
        lane = lax.iota(jnp.int32, dim)
        queries = plgpu.load(
            q_ref.at[row[:, None], head[:, None], lane[None, :]], mask=real[:, None] & (lane[None, :] >= 0), other=0.0
        ).astype(dtype)  # [columns, D]
        parts = BLOCK_SIZE // tile_tokens
        token = lax.iota(jnp.int32, tile_tokens)

        def body(step, best, *, masked):
            block, part = device.divmod_static(step, parts)
            page = jnp.clip(plgpu.load(table_ref.at[request, block]), 0, num_pages - 1)
            tile = (page,) if parts == 1 else (page, pl.ds(part * tile_tokens, tile_tokens))
            keys = plgpu.load(pages_ref.at[tile]).astype(dtype)  # [tokens, D]
            if queries.shape[0] == 1:
                # One column wastes a matrix tile: multiply and add in float32.
                wide = keys.astype(jnp.float32) * jnp.sum(queries.astype(jnp.float32), axis=0)[None, :]
                dots = jnp.sum(wide, axis=1)[:, None]  # [tokens, 1]
            else:
                dots = lax.dot_general(
                    keys,
                    queries,
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
                    preferred_element_type=jnp.float32,
                )  # [tokens, columns]
            dots = rules.clean_products(dots)
            if masked:
                dots = jnp.where((step * tile_tokens + token)[:, None] < kv[None, :], dots, -jnp.inf)
            maxima = jnp.max(dots, axis=0)  # [columns]
            if parts > 1:
                maxima = best = jnp.where(part == 0, maxima, jnp.maximum(maxima, best))
            forced = rules.force_scores(maxima, block, row_blocks, init_blocks, local_blocks)
            plgpu.store(keys_ref.at[head, row, block], rules.order_key(forced), mask=real & (part == parts - 1))
            return best

        start = None if parts == 1 else jnp.full(head.shape, -jnp.inf, jnp.float32)
        if one_block and parts == 1:
            body(first, start, masked=True)
            return
        # Blocks that every query token sees whole need no mask.
        whole = rules.visible_tokens(rules.decode_positions(seq_len, jnp.int32(0), query_len, width)) >> BLOCK_SHIFT
        whole = jnp.clip(whole, first, end)
        lax.fori_loop(first * parts, whole * parts, functools.partial(body, masked=False), start)
        lax.fori_loop(whole * parts, end * parts, functools.partial(body, masked=True), start)

    pl.when(first < end)(score_all)
