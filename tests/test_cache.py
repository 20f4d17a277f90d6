import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3_pallas import IndexCache, insert_index_cache, reference

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]


def filled(pages, dim, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal((pages, 128, dim), np.float32)
    return IndexCache(jnp.asarray(values).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_insert_casts_and_keeps_the_rest(dtype):
    cache = filled(3, 16, dtype)
    index_k = jnp.asarray(np.random.default_rng(1).standard_normal((4, 16), np.float32))
    slots = np.array([5, 255, 128, 383], np.int32)
    result = insert_index_cache(cache, index_k, jnp.asarray(slots))
    expected = np.array(cache.pages).reshape(-1, 16)
    expected[slots] = np.asarray(index_k).astype(expected.dtype)
    np.testing.assert_array_equal(np.asarray(result.pages), expected.reshape(3, 128, 16))
    np.testing.assert_array_equal(
        np.asarray(result.pages), reference.insert_index_cache(np.asarray(cache.pages), np.asarray(index_k), slots)
    )


@pytest.mark.parametrize("slot", [-1, -128, -(2**31), 3 * 128, 3 * 128 + 5, 2**31 - 1])
def test_slots_outside_write_nothing(slot):
    cache = filled(3, 16, "float32")
    index_k = jnp.full((2, 16), 9.0)
    result = insert_index_cache(cache, index_k, jnp.array([slot, 130], jnp.int32))
    expected = np.array(cache.pages)
    expected[1, 2] = 9
    np.testing.assert_array_equal(result.pages, expected)


def test_chunk_from_the_middle_of_a_page_keeps_its_head():
    """sglang-jax #1376"""
    cache = filled(2, 16, "float32")
    result = insert_index_cache(cache, jnp.full((130, 16), 9.0), jnp.arange(5, 135, dtype=jnp.int32))
    np.testing.assert_array_equal(result.pages[0, :5], cache.pages[0, :5])
    assert (result.pages[0, 5:] == 9).all()
    assert (result.pages[1, :7] == 9).all()
    np.testing.assert_array_equal(result.pages[1, 7:], cache.pages[1, 7:])


def test_prefix_hit_of_130_tokens():
    """omlx #1888: the first new token lands at offset 2 of page 1."""
    cache = IndexCache.empty(2, 16, jnp.float32)
    result = insert_index_cache(cache, jnp.ones((1, 16)), jnp.array([130], jnp.int32))
    assert np.argwhere(np.asarray(result.pages[:, :, 0])).tolist() == [[1, 2]]


def test_no_tokens():
    cache = filled(2, 16, "float32")
    result = insert_index_cache(cache, jnp.zeros((0, 16)), jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(result.pages, cache.pages)


def test_empty():
    cache = IndexCache.empty(3)
    assert (cache.pages.shape, cache.pages.dtype) == ((3, 128, 128), jnp.bfloat16)
    assert not cache.pages.any()
    assert IndexCache.empty(3, 64, jnp.float8_e4m3fn, num_layers=2).pages.shape == (2, 3, 128, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(num_pages=0), ValueError, "num_pages must be at least 1, got 0"),
        (dict(num_pages=1, head_dim=0), ValueError, "head_dim must be at least 1, got 0"),
        (dict(num_pages=1, num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
        (dict(num_pages=1, dtype=jnp.int8), TypeError, "dtype must be one of .*, got int8"),
    ],
)
def test_empty_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        IndexCache.empty(**arguments)


def test_pytree():
    cache = filled(2, 16, "bfloat16")
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 1
    restored = jax.tree.unflatten(structure, [np.asarray(leaves[0])])  # as a checkpoint brings it back
    assert isinstance(restored, IndexCache)
    np.testing.assert_array_equal(restored.pages, cache.pages)
    [(path, _)] = jax.tree_util.tree_leaves_with_path(cache)
    assert jax.tree_util.keystr(path) == ".pages"
    doubled = jax.tree.map(lambda x: x + x, cache)
    np.testing.assert_array_equal(doubled.pages, cache.pages + cache.pages)
    assert jax.tree.map(lambda x: x.shape, cache).pages == (2, 128, 16)


def test_scan_over_layers():
    layers = jax.tree.map(lambda *x: jnp.stack(x), *(filled(2, 16, "float32", seed) for seed in range(3)))
    index_k = jnp.arange(3 * 16, dtype=jnp.float32).reshape(3, 1, 16)
    slot = jnp.array([131], jnp.int32)

    def layer(_, xs):
        return None, insert_index_cache(*xs, slot)

    _, result = jax.lax.scan(layer, None, (layers, index_k))
    expected = np.array(layers.pages)
    expected[:, 1, 3] = index_k[:, 0]
    np.testing.assert_array_equal(result.pages, expected)


def test_donated_insert_is_in_place():
    cache = filled(4, 16, "bfloat16")
    address = cache.pages.unsafe_buffer_pointer()
    insert = jax.jit(insert_index_cache, donate_argnums=0)
    result = insert(cache, jnp.ones((1, 16)), jnp.array([7], jnp.int32))
    assert result.pages.unsafe_buffer_pointer() == address
    assert cache.pages.is_deleted()
    assert (result.pages[0, 7] == 1).all()
