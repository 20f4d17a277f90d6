"""Trace-time checks of shapes and dtypes, shared by every implementation, and `check_values` for concrete arrays."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import jax.core
import jax.numpy as jnp
import numpy as np

from m3_pallas.rules import BLOCK_SIZE, MAX_DECODE_BLOCKS, MAX_PREFILL_BLOCKS

if TYPE_CHECKING:
    from m3_pallas.cache import IndexCache

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
PAGE_STRIDES = (8, 16)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, JAX's extended ones (keys) included."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def float_dtype(name: str, dtype: Any) -> None:
    if dtype_name(dtype) not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {dtype_name(dtype)}")


def at_least(name: str, value: Any, low: int) -> int:
    """`value` as a Python int of at least `low`."""
    try:
        number = operator.index(value)
    except Exception as error:  # a tracer refuses with an error of its own
        raise TypeError(f"{name} must be a static Python int, got {value!r}") from error
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    return number


def array(name: str, value: Any, shape: tuple[int | None, ...], letters: str) -> None:
    """`value` is an array of `shape`, where None is any size; `letters` is the shape as the contract writes it."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    actual = tuple(value.shape)
    fits = len(actual) == len(shape) and all(want in (None, have) for want, have in zip(shape, actual, strict=True))
    if not fits:
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be {letters} = [{want}], got shape {list(actual)}")


def int32_array(name: str, value: Any, shape: tuple[int | None, ...], letters: str) -> None:
    array(name, value, shape, letters)
    if value.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {dtype_name(value.dtype)}")


def pages_of(index_kv_cache: Any) -> Any:
    """The pages of an index cache, given as the pytree or as its array, checked."""
    pages = getattr(index_kv_cache, "pages", index_kv_cache)
    array("index_kv_cache", pages, (None, BLOCK_SIZE, None), "[P, 128, D]")
    float_dtype("index_kv_cache", pages.dtype)
    if pages.shape[0] < 1:
        raise ValueError(f"index_kv_cache must have at least one page, got shape {list(pages.shape)}")
    return pages


def insert(cache: IndexCache, index_k: Any, slot_mapping: Any) -> None:
    if not hasattr(cache, "pages"):
        raise TypeError(f"cache must be an IndexCache, got {type(cache).__name__}")
    pages = pages_of(cache)
    array("index_k", index_k, (None, pages.shape[2]), "[tokens, D]")
    if not jnp.issubdtype(index_k.dtype, jnp.floating):
        raise TypeError(f"index_k must be floating point, got {dtype_name(index_k.dtype)}")
    int32_array("slot_mapping", slot_mapping, (index_k.shape[0],), "[tokens]")


def queries(idx_q: Any, pages: Any, block_table: Any, num_kv_heads: Any) -> None:
    """What decode and prefill scoring share: query, cache and table."""
    array("idx_q", idx_q, (None, None, pages.shape[2]), "[T, H, D]")
    float_dtype("idx_q", idx_q.dtype)
    int32_array("block_table", block_table, (None, None), "[R, N]")
    heads = at_least("num_kv_heads", num_kv_heads, 1)
    if idx_q.shape[1] != heads:
        raise ValueError(f"idx_q must have num_kv_heads = {heads} heads, got shape {list(idx_q.shape)}")


def selection(topk: Any, init_blocks: Any, local_blocks: Any) -> tuple[int, int, int]:
    return (
        at_least("topk", topk, 1),
        at_least("init_blocks", init_blocks, 0),
        at_least("local_blocks", local_blocks, 0),
    )


def rows_buffer(name: str, value: Any, heads: int, tokens: int, tail: tuple[int, ...], letters: str) -> None:
    """`value`, where there is one, is int32 `[H, >=T, *tail]`."""
    if value is None:
        return
    int32_array(name, value, (heads, None, *tail), letters)
    if value.shape[1] < tokens:
        raise ValueError(f"{name} must have at least T = {tokens} rows, got shape {list(value.shape)}")


def query_len(decode_query_len: Any, max_decode_query_len: Any) -> tuple[int, int]:
    length = at_least("decode_query_len", decode_query_len, 1)
    longest = at_least("max_decode_query_len", max_decode_query_len, 1)
    if length > longest:
        raise ValueError(f"decode_query_len must be at most max_decode_query_len = {longest}, got {length}")
    return length, longest


def num_decode_blocks(max_seq_len: Any) -> int:
    length = at_least("max_seq_len", max_seq_len, 1)
    blocks = -(-length // BLOCK_SIZE)
    if blocks >= MAX_DECODE_BLOCKS:
        raise ValueError(
            f"max_seq_len must be below {(MAX_DECODE_BLOCKS - 1) * BLOCK_SIZE + 1} "
            f"(fewer than {MAX_DECODE_BLOCKS} blocks), got {length}"
        )
    return blocks


def num_prefill_blocks(max_seq_len: Any) -> int:
    length = at_least("max_seq_len", max_seq_len, 1)
    if length > MAX_PREFILL_BLOCKS * BLOCK_SIZE:
        raise ValueError(f"max_seq_len must be at most {MAX_PREFILL_BLOCKS * BLOCK_SIZE}, got {length}")
    return -(-length // BLOCK_SIZE)


def decode_table(attention_block_table: Any, block_page_stride: Any, requests: int, heads: int, blocks: int) -> None:
    """The fused page-16 table's arguments: both or neither, one head, a table as wide as the context."""
    if (attention_block_table is None) != (block_page_stride is None):
        given = "attention_block_table" if block_page_stride is None else "block_page_stride"
        raise ValueError(f"attention_block_table and block_page_stride go together, got only {given}")
    if attention_block_table is None:
        return
    page_stride(block_page_stride)
    if heads != 1:
        raise ValueError(f"attention_block_table needs one index head, got num_kv_heads = {heads}")
    int32_array("attention_block_table", attention_block_table, (requests, None), "[R, N']")
    if attention_block_table.shape[1] < blocks:
        raise ValueError(
            f"attention_block_table must be at least B = {blocks} blocks wide, "
            f"got shape {list(attention_block_table.shape)}"
        )


def page_stride(block_page_stride: Any) -> int:
    stride = at_least("block_page_stride", block_page_stride, 1)
    if stride not in PAGE_STRIDES:
        raise ValueError(f"block_page_stride must be 8 or 16, got {stride}")
    return stride


def table(topk_idx: Any, block_table: Any, block_page_stride: Any) -> int:
    """Arguments of the page-16 table builders; returns the stride."""
    int32_array("topk_idx", topk_idx, (1, None, None), "[1, T, K]")
    int32_array("block_table", block_table, (None, None), "[R, N']")
    return page_stride(block_page_stride)


def check_values(
    block_table: Any,
    seq_lens: Any,
    *,
    num_pages: int,
    max_seq_len: int,
    cu_seqlens_q: Any = None,
    prefix_lens: Any = None,
) -> None:
    """Check the values that shapes cannot show, on concrete arrays, outside `jax.jit`.

    The calls themselves never read or write outside their arrays whatever these values are; their answer for a
    request that fails here is unspecified. Runs on the host in NumPy.

    Args:
      block_table: `[R, N]` int32.
      seq_lens: `[R]` int32, tokens of each request, this step's included.
      num_pages: P of the cache.
      max_seq_len: the static bound handed to the calls.
      cu_seqlens_q: `[R + 1]` int32, prefill only, together with `prefix_lens`.
      prefix_lens: `[R]` int32, prefill only.

    Raises:
      ValueError: naming the first request that is wrong, the argument and the value: a length that is negative,
        above `max_seq_len` or above `128 * N`; a page id of the used part outside `0 .. P - 1`; a decreasing
        `cu_seqlens_q`; a prefix and query length that do not add up to `seq_lens`.
      TypeError: if an array is traced or not int32, or a bound is no int.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (block_table, seq_lens, cu_seqlens_q, prefix_lens)):
        raise TypeError("check_values needs concrete arrays: call it outside jax.jit")
    at_least("num_pages", num_pages, 0)
    at_least("max_seq_len", max_seq_len, 0)
    table, lengths = np.asarray(block_table), np.asarray(seq_lens)
    int32_array("block_table", table, (None, None), "[R, N]")
    int32_array("seq_lens", lengths, (table.shape[0],), "[R]")
    if (cu_seqlens_q is None) != (prefix_lens is None):
        given = "cu_seqlens_q" if prefix_lens is None else "prefix_lens"
        raise ValueError(f"cu_seqlens_q and prefix_lens go together, got only {given}")
    width = table.shape[1] * BLOCK_SIZE
    for r, length in enumerate(lengths.tolist()):
        if length < 0:
            raise ValueError(f"seq_lens[{r}] = {length} is negative")
        if length > max_seq_len:
            raise ValueError(f"seq_lens[{r}] = {length} is above max_seq_len = {max_seq_len}")
        if length > width:
            raise ValueError(f"seq_lens[{r}] = {length} is above the {width} tokens of a block_table row")
        used = table[r, : -(-length // BLOCK_SIZE)]
        bad = np.flatnonzero((used < 0) | (used >= num_pages))
        if bad.size:
            raise ValueError(f"block_table[{r}, {bad[0]}] = {used[bad[0]]} is outside the cache's {num_pages} pages")
    if cu_seqlens_q is None:
        return
    starts, prefixes = np.asarray(cu_seqlens_q), np.asarray(prefix_lens)
    int32_array("cu_seqlens_q", starts, (lengths.shape[0] + 1,), "[R + 1]")
    int32_array("prefix_lens", prefixes, lengths.shape, "[R]")
    if starts[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] = {starts[0]} is not 0")
    for r, (start, end, prefix, length) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), prefixes.tolist(), lengths.tolist(), strict=True)
    ):
        if end < start:
            raise ValueError(f"cu_seqlens_q[{r + 1}] = {end} is below cu_seqlens_q[{r}] = {start}")
        if prefix < 0:
            raise ValueError(f"prefix_lens[{r}] = {prefix} is negative")
        if prefix + end - start != length:
            raise ValueError(
                f"prefix_lens[{r}] = {prefix} and a query of {end - start} tokens do not add up to "
                f"seq_lens[{r}] = {length}"
            )
