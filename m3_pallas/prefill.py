"""The prefill calls: check the arguments, choose an implementation, run it. The docstrings are the contract."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from m3_pallas import checks, implementations, policy, rules, xla
from m3_pallas.cache import IndexCache
from m3_pallas.implementations import Candidate, Implementation
from m3_pallas.manual_axes import vary_like
from m3_pallas.mosaic_tpu import prefill as mosaic_prefill
from m3_pallas.triton import prefill as triton_prefill

SCORE_WIDTH_MULTIPLE = 16  # scores are padded to this many blocks
# What exists at once in the combined call: scores and candidates for selection; those, queries and ids.
SLICE_BYTES = 50_500_000
SLICE_BYTES_IN_ALL = 54_000_000


def minimax_m3_index_score(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    cu_seqlens_q: jax.Array,
    seq_lens: jax.Array,
    prefix_lens: jax.Array,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.ScoreLaunch | None = None,
) -> jax.Array:
    r"""Score every visible 128-token block of the paged index cache for each prefill token and index head.

    Request r owns rows `cu_seqlens_q[r] : cu_seqlens_q[r + 1]`, the first at position `prefix_lens[r]`. A row sees
    tokens `i <= position` and `i < seq_lens[r]`.

    .. math:: score[h, t, b] = \max_{i \in b\ visible} q_{t,h} \cdot k_i

    These are raw maxima, without forced values; a NaN product counts as -1e30. The score is exactly -inf where the
    block is not visible, in the padding columns, and for rows past `cu_seqlens_q[R]`.

    Letters: R requests, T query tokens, H index heads, D head dim, P pages, N table width,
    B = ceil(max_seq_len / 128).

    Args:
      idx_q: `[T, H, D]` bfloat16, float16, float32 or float8_e4m3fn.
      index_kv_cache: an `IndexCache`, or its pages `[P, 128, D]`, of one of those dtypes.
      block_table: `[R, N]` int32, page of each block; entries past a request's last block are never used.
      cu_seqlens_q: `[R + 1]` int32, not decreasing, from 0.
      seq_lens: `[R]` int32, prefix and query tokens of each request.
      prefix_lens: `[R]` int32, tokens before the chunk; any number, not only multiples of 128.
      max_query_len: static bound of a request's rows.
      max_seq_len: static bound of `seq_lens`, at most 2**30.
      num_kv_heads: H.
      implementation, interpret, launch: as for `minimax_m3_index_decode`.

    Returns:
      `score [H, T, round_up(B, 16)]` float32. The result has no gradient.

    Raises:
      ValueError, TypeError, NotImplementedError: as `minimax_m3_index_decode`.

    Source: vLLM 0.32.0, `minimax_m3_index_score`.
    """
    pages = checks.pages_of(index_kv_cache)
    arrays = (idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens)
    width = _check_score(*arrays, max_query_len, max_seq_len, num_kv_heads)
    implementations.check_options(implementation, interpret, launch, policy.ScoreLaunch)
    return _score(*arrays, width=width, implementation=implementation, interpret=interpret, launch=launch)


def _check_score(
    idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len, max_seq_len, num_kv_heads
) -> int:  # fmt: skip
    """What scoring asks of its arguments; the width of the scores."""
    checks.queries(idx_q, pages, block_table, num_kv_heads)
    requests = block_table.shape[0]
    checks.int32_array("cu_seqlens_q", cu_seqlens_q, (requests + 1,), "[R + 1]")
    checks.int32_array("seq_lens", seq_lens, (requests,), "[R]")
    checks.int32_array("prefix_lens", prefix_lens, (requests,), "[R]")
    checks.at_least("max_query_len", max_query_len, 0)
    num_blocks = checks.num_prefill_blocks(max_seq_len)
    return policy.ceil_div(num_blocks, SCORE_WIDTH_MULTIPLE) * SCORE_WIDTH_MULTIPLE


@functools.partial(jax.jit, static_argnames=("width", "implementation", "interpret", "launch"))
def _score(
    idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens, *, width, implementation, interpret, launch
):  # fmt: skip
    arrays = lax.stop_gradient((idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens))
    reason = triton_prefill.score_unsupported(idx_q, pages, block_table, interpret=interpret)
    triton = functools.partial(triton_prefill.index_score, width=width, launch=launch, interpret=interpret)
    mosaic = functools.partial(mosaic_prefill.index_score, width=width, interpret=interpret)
    candidates = (
        Candidate("xla", functools.partial(xla.index_score, width=width)),
        Candidate("pallas_triton", triton, reason),
        Candidate("pallas_mosaic_tpu", mosaic, mosaic_prefill.score_unsupported(idx_q, pages, block_table)),
    )
    tokens, heads, _ = idx_q.shape
    if 0 in (tokens, *block_table.shape):
        return jnp.full((heads, tokens, width), -jnp.inf, jnp.float32)
    return implementations.run(implementation, "minimax_m3_index_score", candidates, *arrays, interpret=interpret)


def minimax_m3_index_topk(
    score: jax.Array,
    cu_seqlens_q: jax.Array,
    prefix_lens: jax.Array,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.TopkLaunch | None = None,
) -> jax.Array:
    """Select the top-k blocks of each prefill row from its block scores.

    A row at `position` ranks its first `n = position // 128 + 1` blocks, with the forced values and the order of
    `minimax_m3_index_decode`: `min(K, n)` ids, then -1. Rows past `cu_seqlens_q[R]` are all -1.

    Letters: R requests, T query tokens, H index heads, S score width, K = topk.

    Args:
      score: `[H, T, S]` float32, of `minimax_m3_index_score`.
      cu_seqlens_q: `[R + 1]` int32, not decreasing, from 0.
      prefix_lens: `[R]` int32.
      max_query_len: static bound of a request's rows.
      topk: K, any number from 1.
      init_blocks: leading blocks to force.
      local_blocks: trailing visible blocks to force.
      out: `[H, >=T, K]` int32. The result is `out` with `[:, :T]` replaced; in place when donated.
      implementation, interpret: as for `minimax_m3_index_decode`.
      launch: a `policy.TopkLaunch` for the GPU kernel, instead of its policy's.

    Returns:
      `topk_idx [H, T, K]` int32, or `out`'s shape. The result has no gradient.

    Raises:
      ValueError, TypeError, NotImplementedError: as `minimax_m3_index_decode`.

    Source: vLLM 0.32.0, `minimax_m3_index_topk`; the order of equal scores, which vLLM leaves open, is ours.
    """
    checks.array("score", score, (None, None, None), "[H, T, S]")
    if score.dtype != jnp.float32:
        raise TypeError(f"score must be float32, got {checks.dtype_name(score.dtype)}")
    if score.shape[2] > rules.MAX_PREFILL_BLOCKS:
        raise ValueError(f"score must have at most {rules.MAX_PREFILL_BLOCKS} blocks, got shape {list(score.shape)}")
    checks.int32_array("prefix_lens", prefix_lens, (None,), "[R]")
    checks.int32_array("cu_seqlens_q", cu_seqlens_q, (prefix_lens.shape[0] + 1,), "[R + 1]")
    checks.at_least("max_query_len", max_query_len, 0)
    topk, init_blocks, local_blocks = checks.selection(topk, init_blocks, local_blocks)
    checks.rows_buffer("out", out, score.shape[0], score.shape[1], (topk,), "[H, >=T, K]")
    implementations.check_options(implementation, interpret, launch, policy.TopkLaunch)
    return _topk(
        score,
        cu_seqlens_q,
        prefix_lens,
        out,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        implementation=implementation,
        interpret=interpret,
        launch=launch,
    )


@functools.partial(
    jax.jit, static_argnames=("topk", "init_blocks", "local_blocks", "implementation", "interpret", "launch")
)
def _topk(score, cu_seqlens_q, prefix_lens, out, *, topk, init_blocks, local_blocks, implementation, interpret, launch):
    arrays = lax.stop_gradient((score, cu_seqlens_q, prefix_lens, out))
    options = {"topk": topk, "init_blocks": init_blocks, "local_blocks": local_blocks}
    reason = triton_prefill.topk_unsupported(prefix_lens, topk=topk, interpret=interpret)
    triton = functools.partial(triton_prefill.index_topk, **options, launch=launch, interpret=interpret)
    mosaic = functools.partial(mosaic_prefill.index_topk, **options, interpret=interpret)
    candidates = (
        Candidate("xla", functools.partial(xla.index_topk, **options)),
        Candidate("pallas_triton", triton, reason),
        Candidate("pallas_mosaic_tpu", mosaic, mosaic_prefill.topk_unsupported(score, topk)),
    )
    if 0 in (*score.shape, prefix_lens.shape[0]):
        return xla.write_rows(out, jnp.full((*score.shape[:2], topk), -1, jnp.int32))
    return implementations.run(implementation, "minimax_m3_index_topk", candidates, *arrays, interpret=interpret)


def minimax_m3_index_prefill(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    cu_seqlens_q: jax.Array,
    seq_lens: jax.Array,
    prefix_lens: jax.Array,
    max_query_len: int,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    out: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`minimax_m3_index_score` and `minimax_m3_index_topk` in one call, for those who need only the ids.

    The score array never exists whole: rows are scored and selected some tokens at a time, so that beside its result
    the call keeps at most 64 MiB whatever T and the context are. (Where one token's scores alone take more than
    50 MB, it keeps those of one token.)

    Args:
      idx_q .. max_seq_len, num_kv_heads: as for `minimax_m3_index_score`.
      topk, init_blocks, local_blocks, out: as for `minimax_m3_index_topk`.
      implementation, interpret: as for `minimax_m3_index_decode`.

    Returns:
      `topk_idx [H, T, K]` int32 (or `out`'s shape), the ids that the two calls give. The result has no gradient.

    Raises:
      ValueError, TypeError, NotImplementedError: as the two calls.
    """
    score = functools.partial(
        minimax_m3_index_score,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_kv_heads=num_kv_heads,
        implementation=implementation,
        interpret=interpret,
    )
    select = functools.partial(
        minimax_m3_index_topk,
        max_query_len=max_query_len,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        implementation=implementation,
        interpret=interpret,
    )
    pages = checks.pages_of(index_kv_cache)
    arrays = (idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens)
    width = _check_score(*arrays, max_query_len, max_seq_len, num_kv_heads)
    tokens, heads, dim = idx_q.shape
    topk, _, _ = checks.selection(topk, init_blocks, local_blocks)
    checks.rows_buffer("out", out, heads, tokens, (topk,), "[H, >=T, K]")
    candidates = min(policy.topk_candidates(policy.PREFILL_TOPK_GROUPS_AMD, topk), width)
    scores = 4 * heads * (width + candidates)  # bytes a token
    in_all = scores + heads * (dim * idx_q.dtype.itemsize + 4 * topk)
    rows = max(min(SLICE_BYTES // scores, SLICE_BYTES_IN_ALL // in_all), 1)
    if rows >= tokens:
        return select(score(*arrays), cu_seqlens_q, prefix_lens, out=out)
    return _by_slices(score, select, arrays, out, rows=policy.even_size(tokens, rows), topk=topk)


def _by_slices(score, select, arrays, out, *, rows, topk):
    """Ids `[H, T, K]` or `out` with them, `rows` tokens at a time; the last slice moves back and repeats some."""
    idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens = lax.stop_gradient(arrays)
    tokens, heads, _ = idx_q.shape
    starts = jnp.clip(cu_seqlens_q, 0, tokens)

    def step(i, ids):
        first = jnp.minimum(i * rows, tokens - rows)
        queries = xla.take_rows(idx_q, first, rows)
        own_starts = jnp.clip(starts - first, 0, rows)
        own_prefix = prefix_lens + jnp.maximum(first - starts[:-1], 0)
        part = score(queries, pages, block_table, own_starts, seq_lens, own_prefix)
        return lax.dynamic_update_slice_in_dim(ids, select(part, own_starts, own_prefix), first, axis=1)

    ids = jnp.full((heads, tokens, topk), -1, jnp.int32) if out is None else out
    ids = vary_like(ids, idx_q, pages, block_table, cu_seqlens_q, seq_lens, prefix_lens)
    return lax.fori_loop(jnp.int32(0), jnp.int32(policy.ceil_div(tokens, rows)), step, ids)
