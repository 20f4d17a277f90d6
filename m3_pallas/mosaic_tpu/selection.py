"""Selection from order keys in VMEM: blocks along sublanes, rows along lanes. Decode and prefill share it.

K passes over the keys, each for the best one after the last one taken: nothing is written back.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from m3_pallas import policy
from m3_pallas.mosaic_tpu.device import LANES

PASS_BLOCKS = 256  # blocks of one piece of a pass
MAX_BLOCKS = 24576  # 12 MiB of order keys
HIDDEN_KEY = -(2**31)  # below every order key
NO_BLOCK = 2**31 - 1  # above every block id


def key_rows(width: int) -> int:
    """Blocks that `width` blocks take in VMEM."""
    return policy.ceil_div(width, PASS_BLOCKS) * PASS_BLOCKS


def unsupported(width: int) -> str | None:
    """Why the order keys of `width` blocks cannot be held, or None."""
    if width > MAX_BLOCKS:
        return f"{width} blocks are above {MAX_BLOCKS}; use None or 'xla'"
    return None


def vmem_bytes(width: int, topk: int) -> int:
    """VMEM of the order keys, and of the ids of two programs."""
    return (key_rows(width) + 2 * id_rows(topk)) * LANES * 4


def id_rows(topk: int) -> int:
    """Rows that K ids take in VMEM."""
    return policy.ceil_div(topk, 8) * 8


def select(ids_ref, keys_ref, num_blocks, row_blocks, topk: int) -> None:
    """Write the ids `[1, slots, 128]` of `keys_ref [blocks, 128]`, -1 past what each row sees.

    `row_blocks [1, 128]` are the blocks of each row, `num_blocks` the most of them. Keys past them are never used.
    """
    pieces = lax.div(num_blocks + (PASS_BLOCKS - 1), jnp.int32(PASS_BLOCKS))

    def take(i, last):
        last_key, last_block = last  # [1, 128]

        def piece(p, best):
            best_key, best_block = best
            first = pl.multiple_of(p * PASS_BLOCKS, PASS_BLOCKS)
            keys = keys_ref[pl.ds(first, PASS_BLOCKS), :]
            block = first + lax.broadcasted_iota(jnp.int32, keys.shape, 0)
            after = (keys < last_key) | ((keys == last_key) & (block > last_block))
            keys = jnp.where(after & (block < row_blocks), keys, HIDDEN_KEY)
            key = jnp.max(keys, axis=0, keepdims=True)
            lowest = jnp.min(jnp.where(keys == key, block, NO_BLOCK), axis=0, keepdims=True)
            better = key > best_key  # of equal keys, the earlier piece has the lower ids
            return jnp.where(better, key, best_key), jnp.where(better, lowest, best_block)

        none = jnp.full((1, LANES), HIDDEN_KEY, jnp.int32)
        key, block = lax.fori_loop(jnp.int32(0), pieces, piece, (none, none))
        ids_ref[0, pl.ds(i, 1), :] = jnp.where(i < row_blocks, block, -1)
        return key, block

    ids_ref[0] = jnp.full(ids_ref.shape[1:], -1, jnp.int32)
    start = jnp.full((1, LANES), NO_BLOCK, jnp.int32), jnp.full((1, LANES), -1, jnp.int32)
    lax.fori_loop(jnp.int32(0), jnp.int32(topk), take, start)
