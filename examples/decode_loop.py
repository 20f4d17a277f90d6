# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MiniMax-M3 from a paged cache, in plain JAX
#
# A tiny MiniMax-M3 serves several requests at once: chunked prefill, then a jitted greedy decode step.
# `m3_pallas` holds the paged index keys and selects the blocks; everything else is here.
# The tokens, logits and selected blocks are compared with those of Hugging Face transformers.
#
# | letter | |
# |---|---|
# | R, T, S | requests, query tokens, decode steps |
# | V, E, D | vocabulary, hidden size, head dim |
# | H, G | KV heads (= index heads), query heads of each |
# | P, N, K | pages, blocks of the longest request, selected blocks |

# %%
import argparse
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from tqdm import tqdm

from m3_pallas import (
    IndexCache,
    insert_index_cache,
    minimax_m3_index_decode,
    minimax_m3_index_score,
    minimax_m3_index_topk,
    prefill_rows,
)

jax.config.update("jax_default_matmul_precision", "highest")

BLOCK = 128  # tokens of a page, and of a sparse block
FORCED = dict(init_blocks=0, local_blocks=1)
RMS_EPS = 1e-6
ROPE_THETA = 5e6
ROTARY_DIM = 64
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
CHUNK = 192  # prefill tokens per request and round; any number, not only multiples of 128
ATTENTION_ROWS = 16  # query tokens attended at a time, which bounds the gathered keys and values
LOGIT_TOLERANCE = 1e-2

# %% [markdown]
# ## The file
#
# Weights are bfloat16 bits under transformers' names, linear ones `[out, in]`. All sizes follow from the arrays.


# %%
def parse_args():
    script = globals().get("__file__")  # a notebook has none, and no arguments either
    parser = argparse.ArgumentParser(description="Serve a tiny MiniMax-M3 and compare it with transformers.")
    default = Path(script or "").parent / "tiny_m3.npz"
    parser.add_argument("file", nargs="?", type=Path, default=default, help="weights, prompts and answers")
    parser.add_argument("--plot", type=Path, help="save the picture of the selected blocks here")
    return parser.parse_args(None if script else [])


def load_weights(file):
    """`{name: array, "layers": {i: {name: array}}}` in float32."""
    weights = {"layers": {}}
    for name in file:
        if name.startswith("weights/"):
            array = jnp.asarray(file[name].view(jnp.bfloat16), jnp.float32)
            short = name.removeprefix("weights/").removeprefix("model.").removesuffix(".weight")
            if short.startswith("layers."):
                _, i, short = short.split(".", 2)
                weights["layers"].setdefault(int(i), {})[short] = array
            else:
                weights[short] = array
    return weights


args = parse_args()
with np.load(args.file) as npz:
    file = dict(npz)
weights = load_weights(file)
names = sorted({name.split("/")[0] for name in file if name.startswith("request")})
prompts = [file[f"{name}/prompt"].astype(np.int32) for name in names]
num_steps = max(len(file[f"{name}/tokens"]) for name in names)
topk = next(file[name].shape[-1] for name in file if "/decode_blocks/" in name)

# %% [markdown]
# ## The paged cache
#
# Token `i` of request `r` lies in page `block_table[r, i // 128]` at offset `i % 128`, in every layer.


# %%
class LayerCache(NamedTuple):
    k: jax.Array  # [P, H, 128, D]
    v: jax.Array  # [P, H, 128, D]
    index: IndexCache | None  # pages [P, 128, D]; None where attention is dense


def empty_cache(layer, num_pages):
    head_dim = len(layer["self_attn.k_norm"])
    num_kv_heads = len(layer["self_attn.k_proj"]) // head_dim
    sparse = "self_attn.indexer.k_norm" in layer
    index = IndexCache.empty(num_pages, len(layer["self_attn.indexer.k_norm"]), jnp.float32) if sparse else None
    return LayerCache(*jnp.zeros((2, num_pages, num_kv_heads, BLOCK, head_dim)), index)


def shuffled_block_table(max_seq_lens):
    """A block table `[R, N]` of pages in random order, -1 past a request's last block; and P."""
    num_blocks = -(-max_seq_lens // BLOCK)  # [R]
    pages = np.random.default_rng(0).permutation(num_blocks.sum())
    table = np.full((len(num_blocks), num_blocks.max()), -1, np.int32)
    table[np.arange(num_blocks.max()) < num_blocks[:, None]] = pages
    return jnp.asarray(table), len(pages)


# %% [markdown]
# ## The model
#
# Prefill and decode differ only in `select(idx_q, index_cache)`. A dense layer attends to all blocks.


# %%
def rms_norm(x, weight):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + RMS_EPS) * (1 + weight)


def rope(x, position):  # [T, H, D], [T]
    angle = position[:, None, None] * ROPE_THETA ** (-jnp.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)  # [T, 1, 32]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = jnp.split(x, [ROTARY_DIM // 2, ROTARY_DIM], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def project_heads(layer, name, x, position):
    norm = layer[f"{name}_norm"]
    heads = (x @ layer[f"{name}_proj"].T).reshape(len(x), -1, len(norm))  # [T, H, D]
    return rope(rms_norm(heads, norm), position)


def block_attention(q, blocks, block_table, position, cache):
    """One token's attention, q `[H, G, D]`, to the blocks `[H, K]` of its request, whose table is `[N]`."""
    page, head = block_table[blocks], jnp.arange(len(blocks))[:, None]  # [H, K], [H, 1]
    k, v = cache.k[page, head], cache.v[page, head]  # [H, K, 128, D]
    token = blocks[..., None] * BLOCK + jnp.arange(BLOCK)  # [H, K, 128]
    visible = (blocks[..., None] >= 0) & (token <= position)
    logits = jnp.einsum("hgd,hktd->hgkt", q, k) / np.sqrt(q.shape[-1])
    logits = jnp.where(visible[:, None], logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("hgkt,hktd->hgd", jax.nn.softmax(logits, axis=(-2, -1)), v)


def attention(layer, cache, x, block_table, request, position, slots, select):
    """The output `[T, E]`, the cache with this call's tokens, the blocks `[T, H, K]` attended to."""
    q = project_heads(layer, "self_attn.q", x, position)  # [T, H * G, D]
    k = project_heads(layer, "self_attn.k", x, position)  # [T, H, D]
    v = (x @ layer["self_attn.v_proj"].T).reshape(k.shape)
    paged = (slots // BLOCK, slice(None), slots % BLOCK)
    cache = LayerCache(cache.k.at[paged].set(k, mode="drop"), cache.v.at[paged].set(v, mode="drop"), cache.index)
    if cache.index is None:
        num_blocks = block_table.shape[1]
        blocks = jnp.broadcast_to(jnp.arange(num_blocks), (*k.shape[:2], num_blocks))
    else:
        idx_q = project_heads(layer, "self_attn.indexer.q", x, position)  # [T, H, D]
        idx_k = project_heads(layer, "self_attn.indexer.k", x, position)[:, 0]  # [T, D]
        cache = cache._replace(index=insert_index_cache(cache.index, idx_k, slots))
        blocks = select(idx_q, cache.index).swapaxes(0, 1)  # [T, H, K]
    q = q.reshape(*k.shape[:2], -1, k.shape[-1])  # [T, H, G, D]
    rows = (q, blocks, block_table[request], position)
    out = lax.map(lambda row: block_attention(*row, cache), rows, batch_size=ATTENTION_ROWS)  # [T, H, G, D]
    return out.reshape(len(x), -1) @ layer["self_attn.o_proj"].T, cache, blocks


def mlp(layer, x):
    gate, up = jnp.split(x @ layer["mlp.gate_up_proj"].T, 2, axis=-1)
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)) @ layer["mlp.down_proj"].T


def forward(weights, caches, tokens, block_table, request, position, select):
    """The logits `[T, V]`, the new caches, and each sparse layer's selected blocks `[T, H, K]`."""
    page = block_table[request, position // BLOCK]
    num_slots = caches[0].k.shape[0] * BLOCK
    slots = jnp.where(position < 0, num_slots, page * BLOCK + position % BLOCK)  # padding rows write nothing
    h, new_caches, selected = weights["embed_tokens"][tokens], {}, {}  # [T, E]
    for i, layer in weights["layers"].items():
        x = rms_norm(h, layer["input_layernorm"])
        out, new_caches[i], blocks = attention(layer, caches[i], x, block_table, request, position, slots, select)
        h += out
        h += mlp(layer, rms_norm(h, layer["post_attention_layernorm"]))
        if caches[i].index is not None:
            selected[i] = blocks
    return rms_norm(h, weights["norm"]) @ weights["lm_head"].T, new_caches, selected


# %% [markdown]
# ## Serving
#
# Both jitted calls donate the caches, so that they are updated in place.


# %%
@functools.partial(jax.jit, static_argnames="topk", donate_argnames="caches")
def prefill_chunk(weights, caches, tokens, block_table, cu_seqlens_q, seq_lens, prefix_lens, topk):
    def select(idx_q, index_cache):
        lens = dict(cu_seqlens_q=cu_seqlens_q, prefix_lens=prefix_lens, max_query_len=CHUNK)
        sizes = dict(max_seq_len=block_table.shape[1] * BLOCK, num_kv_heads=idx_q.shape[1])
        score = minimax_m3_index_score(idx_q, index_cache, block_table, seq_lens=seq_lens, **lens, **sizes)
        return minimax_m3_index_topk(score, topk=topk, **lens, **FORCED)

    request, position = prefill_rows(cu_seqlens_q, prefix_lens, len(tokens))
    return forward(weights, caches, tokens, block_table, request, position, select)


@functools.partial(jax.jit, static_argnames="topk", donate_argnames="caches")
def decode_step(weights, caches, tokens, block_table, seq_lens, topk):
    def select(idx_q, index_cache):
        sizes = dict(max_seq_len=block_table.shape[1] * BLOCK, num_kv_heads=idx_q.shape[1])
        query = dict(decode_query_len=1, max_decode_query_len=1)
        return minimax_m3_index_decode(idx_q, index_cache, block_table, seq_lens, topk=topk, **sizes, **query, **FORCED)

    return forward(weights, caches, tokens, block_table, jnp.arange(len(tokens)), seq_lens - 1, select)


def prefill(weights, caches, prompts, block_table, topk):
    """The caches; of every row its request, -1 for padding, its logits `[V]` and its blocks `[H, K]` by layer."""
    prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
    rounds = []
    for start in tqdm(range(0, prompt_lens.max(), CHUNK), desc="prefill"):
        prefix_lens, seq_lens = np.minimum(prompt_lens, start), np.minimum(prompt_lens, start + CHUNK)
        cu_seqlens_q = np.cumsum([0, *(seq_lens - prefix_lens)], dtype=np.int32)
        padding = (0, len(prompts) * CHUNK - cu_seqlens_q[-1])  # one T for all rounds
        tokens = np.pad(np.concatenate([prompt[start : start + CHUNK] for prompt in prompts]), padding)
        request = np.pad(np.repeat(np.arange(len(prompts)), np.diff(cu_seqlens_q)), padding, constant_values=-1)
        lens = (cu_seqlens_q, seq_lens, prefix_lens)
        logits, caches, blocks = prefill_chunk(weights, caches, tokens, block_table, *lens, topk)
        rounds.append((request, logits, blocks))
    return caches, *jax.tree.map(lambda *parts: np.concatenate(parts), *rounds)


def decode(weights, caches, logits, block_table, seq_lens, num_steps, topk):
    """Greedy tokens `[S, R]`, the logits `[S, R, V]` they were chosen from, the blocks `[S, R, H, K]` by layer."""
    steps = []
    for _ in tqdm(range(num_steps), desc="decode"):
        tokens, seq_lens = jnp.argmax(logits, axis=-1), seq_lens + 1
        next_logits, caches, blocks = decode_step(weights, caches, tokens, block_table, seq_lens, topk)
        steps.append((tokens, logits, blocks))
        logits = next_logits
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)


# %%
prompt_lens = np.array([len(prompt) for prompt in prompts], np.int32)
block_table, num_pages = shuffled_block_table(prompt_lens + num_steps)
caches = {i: empty_cache(layer, num_pages) for i, layer in weights["layers"].items()}
print(f"{len(prompts)} requests of {prompt_lens.tolist()} tokens in {num_pages} shuffled pages, K = {topk}")

caches, request, prefill_logits, prefill_blocks = prefill(weights, caches, prompts, block_table, topk)
last_logits = np.stack([prefill_logits[request == r][-1] for r in range(len(prompts))])
tokens, logits, decode_blocks = decode(weights, caches, last_logits, block_table, prompt_lens, num_steps, topk)

# %% [markdown]
# ## Comparison with transformers
#
# Its selected blocks, too, come by higher score: ids are compared place by place.

# %%
ours = {}  # under the file's names
for r, name in enumerate(names):
    steps = slice(len(file[f"{name}/tokens"]))
    ours |= {f"{name}/tokens": tokens[steps, r], f"{name}/logits": logits[steps, r]}
    for i in decode_blocks:
        ours[f"{name}/prefill_blocks/layer{i}"] = prefill_blocks[i][request == r].swapaxes(0, 1)
        ours[f"{name}/decode_blocks/layer{i}"] = decode_blocks[i][steps, r]


def equal(name):
    if name.endswith("/logits"):
        return np.allclose(ours[name], file[name], rtol=0, atol=LOGIT_TOLERANCE)
    return np.array_equal(ours[name], file[name])


logit_error = max(np.max(np.abs(ours[f"{name}/logits"] - file[f"{name}/logits"])) for name in names)
print(f"largest logit difference: {logit_error:.1e}")
differing = [name for name in ours if not equal(name)]
if differing:
    raise AssertionError(f"different from transformers: {', '.join(differing)}")
num_tokens = sum(ours[name].size for name in ours if name.endswith("/tokens"))
num_rows = sum(ours[name].size // topk for name in ours if "_blocks/" in name)
print(f"equal to transformers: all {num_tokens} tokens and all {num_rows} rows of selected blocks")

# %% [markdown]
# ## Selected blocks
#
# The longest request, while it decodes. Its newest block is always selected, and first.


# %%
def plot_blocks(blocks):
    """A heatmap per sparse layer and index head of the blocks `[S, H, K]` by layer; the colour is the rank."""
    _, num_heads, topk = next(iter(blocks.values())).shape
    shape = dict(nrows=len(blocks), ncols=num_heads, figsize=(4.5 * num_heads, 2.8 * len(blocks)))
    fig, axes = plt.subplots(**shape, sharex=True, sharey=True, squeeze=False, layout="constrained")
    cmap = plt.get_cmap("viridis", topk)
    for row, (i, ids) in zip(axes, blocks.items(), strict=True):
        for head, ax in enumerate(row):
            rank = np.full((ids.max() + 1, len(ids)), np.nan)  # [N, S]
            step, place = np.nonzero(ids[:, head] >= 0)
            rank[ids[step, head, place], step] = place + 1
            image = ax.imshow(rank, origin="lower", aspect="auto", cmap=cmap, vmin=0.5, vmax=topk + 0.5)
            ax.set_title(f"layer {i}, index head {head}")
    fig.supxlabel("decode step")
    fig.supylabel("block")
    fig.colorbar(image, ax=axes, label="rank", ticks=range(1, topk + 1))
    return fig


longest = np.argmax(prompt_lens)
figure = plot_blocks({i: blocks[:, longest] for i, blocks in decode_blocks.items()})
if args.plot:
    figure.savefig(args.plot, dpi=150)
