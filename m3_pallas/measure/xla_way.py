"""How the indexer is usually written in JAX, as something to compare with: M3's one forced block, no other."""

import jax
import jax.numpy as jnp


def decode(q, pages, table, seq_lens, max_seq_len, topk, init, local, heads, query_len, max_query_len):
    """Gather every page, one einsum over whole sequences, mask, block max, `lax.top_k`."""
    requests, blocks = table.shape
    keys = pages[table].reshape(requests, blocks * 128, 128)
    query = q.reshape(requests, query_len, heads, 128)
    dots = jnp.einsum("rqhd,rkd->hrqk", query, keys, preferred_element_type=jnp.float32)
    position = seq_lens[:, None] - query_len + jnp.arange(query_len, dtype=jnp.int32)[None, :]
    dots = jnp.where(jnp.arange(blocks * 128)[None, None, None, :] <= position[None, :, :, None], dots, -jnp.inf)
    score = dots.reshape(*dots.shape[:3], blocks, 128).max(-1)
    score = jnp.where(jnp.arange(blocks)[None, None, None, :] == (position // 128)[None, :, :, None], 1e29, score)
    found = min(topk, blocks)
    ids = jax.lax.top_k(score, found)[1].reshape(heads, -1, found)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, topk - found)), constant_values=-1)


def prefill(q, pages, table, cu_seqlens_q, seq_lens, prefix_lens, *, heads, topk):
    """The same for the one request of a prefill chunk: ids of its rows."""
    tokens, blocks = q.shape[0], table.shape[1]
    keys = pages[table[0]].reshape(blocks * 128, 128)
    dots = jnp.einsum("thd,kd->htk", q, keys, preferred_element_type=jnp.float32)
    position = prefix_lens[0] + jnp.arange(tokens, dtype=jnp.int32)
    dots = jnp.where(jnp.arange(blocks * 128)[None, None, :] <= position[None, :, None], dots, -jnp.inf)
    score = dots.reshape(heads, tokens, blocks, 128).max(-1)
    score = jnp.where(jnp.arange(blocks)[None, None, :] == (position // 128)[None, :, None], 1e29, score)
    best, ids = jax.lax.top_k(score, min(topk, blocks))
    ids = jnp.where(best == -jnp.inf, -1, ids)
    return jnp.pad(ids, ((0, 0), (0, 0), (0, topk - ids.shape[-1])), constant_values=-1)
