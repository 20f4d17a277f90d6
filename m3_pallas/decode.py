"""The decode call: check the arguments, choose an implementation, run it. The docstring is the contract."""

import functools
from typing import Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax

from m3_pallas import checks, implementations, policy, sparse_table, xla
from m3_pallas.cache import IndexCache
from m3_pallas.implementations import Candidate, Implementation
from m3_pallas.mosaic_tpu import decode as mosaic_decode
from m3_pallas.triton import decode as triton_decode


class IndexDecodeResult(NamedTuple):
    """What decode returns when a table or a counter was asked for; fields not asked for are None."""

    topk_idx: jax.Array  # [H, T, K]
    sparse_block_table: jax.Array | None  # [T, K * 8]
    sparse_context_lens: jax.Array | None  # [T]
    completion_counter: jax.Array | None  # [H, >=T]


@overload
def minimax_m3_index_decode(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: jax.Array | None = None,
    *,
    attention_block_table: None = None,
    block_page_stride: None = None,
    completion_counter: None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.DecodeLaunch | None = None,
) -> jax.Array: ...


@overload
def minimax_m3_index_decode(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: jax.Array | None = None,
    *,
    attention_block_table: jax.Array,
    block_page_stride: Literal[8, 16],
    completion_counter: jax.Array | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.DecodeLaunch | None = None,
) -> IndexDecodeResult: ...


@overload
def minimax_m3_index_decode(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: jax.Array | None = None,
    *,
    attention_block_table: None = None,
    block_page_stride: None = None,
    completion_counter: jax.Array,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.DecodeLaunch | None = None,
) -> IndexDecodeResult: ...


def minimax_m3_index_decode(
    idx_q: jax.Array,
    index_kv_cache: IndexCache | jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: jax.Array | None = None,
    *,
    attention_block_table: jax.Array | None = None,
    block_page_stride: Literal[8, 16] | None = None,
    completion_counter: jax.Array | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    launch: policy.DecodeLaunch | None = None,
) -> jax.Array | IndexDecodeResult:
    r"""Select the top-k 128-token blocks of the paged index cache for each decode token and index head.

    Row `t = r * decode_query_len + j` stands at position `seq_lens[r] - decode_query_len + j` and sees the tokens
    at or before it, `kv` of them in `n = ceil(kv / 128)` blocks.

    .. math:: score[h, t, b] = \max_{i \in b,\ i < kv} q_{t,h} \cdot k_i

    Then the last `local_blocks` visible blocks count as 1e29 and, of the others, the first `init_blocks` as 1e30.
    The ids come by higher score, equal scores by lower id; NaN counts as -1e30 and -0.0 as +0.0. There are
    `min(K, n)` of them, then -1. A row that sees nothing is all -1.

    Letters: R requests, T = R * decode_query_len query tokens, H index heads, D head dim, P pages, N table width,
    B = ceil(max_seq_len / 128), K = topk.

    Args:
      idx_q: `[T, H, D]` bfloat16, float16, float32 or float8_e4m3fn.
      index_kv_cache: an `IndexCache`, or its pages `[P, 128, D]`, of one of those dtypes.
      block_table: `[R, N]` int32, page of each block; entries past a request's last block are never used.
      seq_lens: `[R]` int32, this step's tokens included; 0 for a padded request.
      max_seq_len: static bound of `seq_lens`; fewer than 65535 blocks.
      topk: K, any number from 1.
      init_blocks: leading blocks to force.
      local_blocks: trailing visible blocks to force.
      num_kv_heads: H; each index head selects for its own KV head.
      decode_query_len: query tokens a request, 1 .. `max_decode_query_len`.
      max_decode_query_len: fixes the compiled tile, so that kernels are reused across `decode_query_len`.
      out: `[H, >=T, K]` int32. The result is `out` with `[:, :T]` replaced; in place when donated.
      attention_block_table: `[R, N']` int32, N' >= B: also return the page-16 table of
        `build_sparse_block_table_decode`. Goes with `block_page_stride`; needs H = 1.
      block_page_stride: 8 or 16.
      completion_counter: `[H, >=T]` int32: scratch of the GPU merge, returned with its first T columns zeroed. What it
        holds never matters.
      implementation: "xla", "pallas_triton" or "pallas_mosaic_tpu". None picks by the platform being lowered for
        and falls back to "xla" where no kernel serves.
      interpret: run a named Pallas implementation in JAX's interpreter. "xla" has nothing to interpret.
      launch: override of the GPU launch policy; used where "pallas_triton" runs.

    Returns:
      `topk_idx [H, T, K]` int32 (or `out`'s shape), or an `IndexDecodeResult` if a table or counter was asked for.
      Every implementation returns the same ids, but for scores closer than the rounding of their sums
      (docs/numerics.md). The result has no gradient.

    Raises:
      ValueError: on shapes and numbers that do not fit, and on an unknown implementation.
      TypeError: on dtypes other than those above, and on bounds that are not static ints.
      NotImplementedError: if the named implementation cannot serve these arguments.

    Source: vLLM 0.32.0, `minimax_m3_index_decode`.
    """
    pages = checks.pages_of(index_kv_cache)
    checks.queries(idx_q, pages, block_table, num_kv_heads)
    tokens, heads, _ = idx_q.shape
    requests = block_table.shape[0]
    checks.int32_array("seq_lens", seq_lens, (requests,), "[R]")
    num_blocks = checks.num_decode_blocks(max_seq_len)
    topk, init_blocks, local_blocks = checks.selection(topk, init_blocks, local_blocks)
    query_len, max_query_len = checks.query_len(decode_query_len, max_decode_query_len)
    if tokens != requests * query_len:
        raise ValueError(
            f"idx_q must have R * decode_query_len = {requests} * {query_len} rows, got shape {list(idx_q.shape)}"
        )
    checks.decode_table(attention_block_table, block_page_stride, requests, heads, num_blocks)
    checks.rows_buffer("out", out, heads, tokens, (topk,), "[H, >=T, K]")
    checks.rows_buffer("completion_counter", completion_counter, heads, tokens, (), "[H, >=T]")
    implementations.check_options(implementation, interpret, launch, policy.DecodeLaunch)
    if launch is not None:
        launch.selection.check(num_blocks, topk)

    result = _decode(
        idx_q,
        pages,
        block_table,
        seq_lens,
        out,
        attention_block_table,
        completion_counter,
        num_blocks=num_blocks,
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        query_len=query_len,
        max_query_len=max_query_len,
        block_page_stride=block_page_stride,
        implementation=implementation,
        interpret=interpret,
        launch=launch,
    )
    plain = attention_block_table is None and completion_counter is None
    return result.topk_idx if plain else result


@functools.partial(
    jax.jit,
    static_argnames=(
        "num_blocks",
        "topk",
        "init_blocks",
        "local_blocks",
        "query_len",
        "max_query_len",
        "block_page_stride",
        "implementation",
        "interpret",
        "launch",
    ),
)
def _decode(
    idx_q,
    pages,
    block_table,
    seq_lens,
    out,
    attention_block_table,
    completion_counter,
    *,
    num_blocks,
    topk,
    init_blocks,
    local_blocks,
    query_len,
    max_query_len,
    block_page_stride,
    implementation,
    interpret,
    launch,
):
    call = "minimax_m3_index_decode"
    arrays = (idx_q, pages, block_table, seq_lens, out, attention_block_table, completion_counter)
    options = {
        "num_blocks": num_blocks,
        "topk": topk,
        "init_blocks": init_blocks,
        "local_blocks": local_blocks,
        "query_len": query_len,
        "block_page_stride": block_page_stride,
    }
    reason = triton_decode.unsupported(idx_q, pages, topk=topk, max_query_len=max_query_len, interpret=interpret)
    triton = functools.partial(
        triton_decode.index_decode, **options, max_query_len=max_query_len, launch=launch, interpret=interpret
    )
    mosaic_reason = mosaic_decode.unsupported(
        idx_q, pages, requests=len(seq_lens), num_blocks=num_blocks, topk=topk, max_query_len=max_query_len
    )
    mosaic = functools.partial(mosaic_decode.index_decode, **options, interpret=interpret)
    candidates = (
        Candidate("xla", functools.partial(xla.index_decode, **options)),
        Candidate("pallas_triton", triton, reason),
        Candidate("pallas_mosaic_tpu", mosaic, mosaic_reason),
    )
    arrays = lax.stop_gradient(arrays)
    if 0 in (idx_q.shape[0], block_table.shape[1]):
        return IndexDecodeResult(*_empty_decode(*arrays, topk=topk))
    return IndexDecodeResult(*implementations.run(implementation, call, candidates, *arrays, interpret=interpret))


def _empty_decode(idx_q, pages, block_table, seq_lens, out, attention_block_table, completion_counter, *, topk):
    """The answer where there is nothing to read: no tokens, or tables of no blocks."""
    tokens, heads, _ = idx_q.shape
    topk_idx = jnp.full((heads, tokens, topk), -1, jnp.int32)
    table = lens = None
    if attention_block_table is not None:
        table, lens = sparse_table.empty_table(topk_idx)
    return xla.write_rows(out, topk_idx), table, lens, xla.clear_rows(completion_counter, tokens)
