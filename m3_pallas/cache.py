"""The paged index-K cache as a pytree, and the functional insert."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from m3_pallas import checks
from m3_pallas.rules import BLOCK_SHIFT, BLOCK_SIZE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexCache:
    """One layer's paged index keys, `[P, 128, D]`; one key vector per token, shared by all index heads.

    A pytree with the single leaf `pages`. Inside `jax.lax.scan` over layers, or under `jax.tree.map`, the leaf
    may be anything: `IndexCache(stacked)` with pages `[L, P, 128, D]` scans into one `IndexCache` a layer. Shapes
    and dtypes are checked where the cache is used.

    Attributes:
      pages: `[P, 128, D]`, bfloat16, float16, float32 or float8_e4m3fn. Token `i` of a request lies in page
        `block_table[r, i // 128]` at offset `i % 128`.
    """

    pages: jax.Array

    @classmethod
    def empty(
        cls, num_pages: int, head_dim: int = 128, dtype: DTypeLike = jnp.bfloat16, *, num_layers: int | None = None
    ) -> "IndexCache":
        """A cache of zeros: pages `[num_pages, 128, head_dim]`, or one such per layer, stacked in front.

        Raises:
          ValueError: if a count is below 1.
          TypeError: if `dtype` is none of the cache dtypes.
        """
        for name, value in (("num_pages", num_pages), ("head_dim", head_dim), ("num_layers", num_layers)):
            if value is not None:
                checks.at_least(name, value, 1)
        checks.float_dtype("dtype", jnp.dtype(dtype))
        layers = () if num_layers is None else (num_layers,)
        return cls(jnp.zeros((*layers, num_pages, BLOCK_SIZE, head_dim), dtype))


def insert_index_cache(cache: IndexCache, index_k: jax.Array, slot_mapping: jax.Array) -> IndexCache:
    """Write one key vector per token into the cache; in place when `cache` is donated.

    Args:
      cache: pages `[P, 128, D]`.
      index_k: `[tokens, D]`, any float dtype; cast to the cache's.
      slot_mapping: `[tokens]` int32, `page * 128 + offset`. A slot below 0 or at or past `P * 128` writes nothing.
        Slots are distinct otherwise: of two equal ones, either may win.

    Returns:
      The cache with those tokens replaced and every other token kept.

    Raises:
      ValueError: on mismatched shapes. TypeError: on other dtypes.
    """
    checks.insert(cache, index_k, slot_mapping)
    pages = cache.pages
    slots = lax.stop_gradient(slot_mapping)
    # JAX wraps negative indices, so those go to the page past the end, which mode="drop" skips.
    page = jnp.where(slots < 0, jnp.int32(pages.shape[0]), slots >> BLOCK_SHIFT)
    offset = slots & (BLOCK_SIZE - 1)
    values = lax.stop_gradient(index_k).astype(pages.dtype)
    return IndexCache(lax.stop_gradient(pages).at[page, offset].set(values, mode="drop"))
