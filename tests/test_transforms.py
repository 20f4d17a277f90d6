"""The calls under JAX's transforms."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

import m3_pallas
from m3_pallas import IndexCache
from m3_pallas.measure import calls
from m3_pallas.measure.cases import Decode, Prefill, decode_inputs, prefill_inputs

CASE = Decode(seq_lens=(700, 0, 130), heads=2, topk=3, seed=200, head_dim=32)
PREFILL = Prefill(query_lens=(9, 4), prefix_lens=(130, 700), heads=2, topk=3, seed=201, head_dim=32)
ARRAYS = ("idx_q", "index_kv_cache", "block_table", "seq_lens")


def statics(case, max_seq_len):
    return dict(
        max_seq_len=max_seq_len, topk=case.topk, init_blocks=0, local_blocks=1, num_kv_heads=case.heads,
        decode_query_len=case.query_len, max_decode_query_len=case.max_query_len,
    )  # fmt: skip


@pytest.fixture(scope="module")
def arrays():
    inputs = decode_inputs(CASE)
    return [jnp.asarray(inputs[name]) for name in ARRAYS]


@pytest.fixture(scope="module")
def expected():
    return calls.decode_oracle(CASE)[0]


decode = functools.partial(m3_pallas.minimax_m3_index_decode, **statics(CASE, 700))


def test_jit_and_cache_pytree(arrays, expected, options):
    queries, pages, *rest = arrays
    run = jax.jit(functools.partial(decode, **options))
    np.testing.assert_array_equal(run(queries, pages, *rest), expected)
    np.testing.assert_array_equal(run(queries, IndexCache(pages), *rest), expected)


def test_vmap(arrays, expected, options):
    queries, *rest = arrays
    run = jax.vmap(functools.partial(decode, **options), in_axes=(0, None, None, None))
    ids = run(jnp.stack([queries, -queries]), *rest)
    np.testing.assert_array_equal(ids[0], expected)
    np.testing.assert_array_equal(ids[1], decode(-queries, *rest, implementation="xla"))


def test_scan_over_layers(arrays, options):
    """Each layer inserts, then selects, from its slice of stacked pages."""
    queries, pages, table, seq_lens = arrays
    layers = IndexCache(jnp.stack([pages, -pages]))
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, 32)), pages.dtype)
    slot = table[0, 5:6] * 128 + 59  # the last of request 0's 700 tokens

    def layer(_, xs):
        cache = m3_pallas.insert_index_cache(*xs, slot)
        return None, (decode(queries, cache, table, seq_lens, **options), cache)

    _, (ids, caches) = jax.jit(lambda xs: jax.lax.scan(layer, None, xs))((layers, keys))
    for i in range(2):
        inputs = dict(zip(ARRAYS, map(np.asarray, (queries, caches.pages[i], table, seq_lens)), strict=True))
        np.testing.assert_array_equal(ids[i], calls.decode_oracle(CASE, inputs)[0])


def test_eval_shape(arrays, options):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    result = jax.eval_shape(functools.partial(decode, **options), *shapes)
    assert (result.shape, result.dtype) == ((2, 3, 3), jnp.int32)
    cache = IndexCache(shapes[1])
    assert jax.eval_shape(functools.partial(decode, **options), shapes[0], cache, *shapes[2:]).shape == (2, 3, 3)


def test_donated_out_is_in_place(arrays, expected, options):
    run = jax.jit(lambda out, *a: decode(*a, out=out, **options), donate_argnums=0)
    out = jnp.full((2, 7, 3), 9, jnp.int32)
    address = out.unsafe_buffer_pointer()
    result = run(out, *arrays)
    assert result.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(result[:, :3], expected)
    np.testing.assert_array_equal(result[:, 3:], 9)


def test_out_keeps_its_other_rows(arrays, expected, options):
    out = jnp.full((2, 7, 3), 9, jnp.int32)
    result = decode(*arrays, out=out, **options)
    np.testing.assert_array_equal(result[:, :3], expected)
    np.testing.assert_array_equal(result[:, 3:], 9)
    assert (out == 9).all()


def test_topk_out(options):
    inputs = prefill_inputs(PREFILL)
    score, ids = calls.prefill(PREFILL, inputs, **options)
    out = jnp.full((2, 20, 3), 9, jnp.int32)
    result = m3_pallas.minimax_m3_index_topk(
        score, inputs["cu_seqlens_q"], inputs["prefix_lens"], inputs["max_query_len"], 3, 0, 1, out, **options
    )
    np.testing.assert_array_equal(result[:, :13], ids)
    np.testing.assert_array_equal(result[:, 13:], 9)


def test_gradient_is_zero(arrays, options):
    queries, pages, table, seq_lens = arrays
    inputs = prefill_inputs(PREFILL)
    rest = {k: v for k, v in inputs.items() if k not in ("idx_q", "index_kv_cache")}

    def loss(queries, pages):
        ids = decode(queries, pages, table, seq_lens, **options)
        kept = m3_pallas.insert_index_cache(IndexCache(pages), queries[:, 0], seq_lens)
        return jnp.sum(ids).astype(jnp.float32) + jnp.nansum(kept.pages.astype(jnp.float32))

    def prefill_loss(queries, pages):
        score = m3_pallas.minimax_m3_index_score(queries, pages, **rest, num_kv_heads=2, **options)
        return jnp.sum(jnp.where(jnp.isneginf(score), 0.0, score))

    prefill_arrays = [jnp.asarray(inputs[name]) for name in ("idx_q", "index_kv_cache")]
    for function, at in ((loss, (queries, pages)), (prefill_loss, prefill_arrays)):
        for gradient in jax.grad(function, (0, 1))(*at):
            assert not gradient.astype(jnp.float32).any()


KERNELS = {"cpu": "", "tpu": "tpu_custom_call", "cuda": "xla.gpu.triton", "rocm": "xla.gpu.triton"}
DEVICE_KINDS = {"cuda": "NVIDIA H200", "rocm": "gfx950"}


def prefill_call(*arrays):
    """The combined call on `PREFILL`, at a head dim of 128."""
    return m3_pallas.minimax_m3_index_prefill(*arrays, 9, 800, 3, 0, 1, 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="exports from a CPU host")
@pytest.mark.parametrize("call", ["decode", "prefill"])
@pytest.mark.parametrize("platform", KERNELS)
def test_export(platform, call):
    """For one platform at a time, from a host that has none of the others."""
    if call == "decode":
        case = Decode(seq_lens=(700, 130), heads=2, topk=3, seed=203)
        inputs, names, expected = decode_inputs(case), ARRAYS, calls.decode_oracle(case)[0]
        call = jax.jit(functools.partial(m3_pallas.minimax_m3_index_decode, **statics(case, 700)))
    else:
        case = dataclasses.replace(PREFILL, head_dim=128)
        inputs, expected = prefill_inputs(case), calls.prefill_oracle(case)[1]
        names = ("idx_q", "index_kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "prefix_lens")
        call = jax.jit(prefill_call)
    arrays = [jnp.asarray(inputs[name]) for name in names]
    kind = DEVICE_KINDS.get(platform, "cpu")
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu" if platform in DEVICE_KINDS else platform)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        exported = jax.export.export(
            call, platforms=[platform], disabled_checks=m3_pallas.EXPORT_DISABLED_CHECKS
        )(*arrays)  # fmt: skip
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == (platform,)
    assert KERNELS[platform] in restored.mlir_module()
    if platform == "cpu":
        np.testing.assert_array_equal(restored.call(*arrays), expected)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="exports from a CPU host")
def test_export_for_several_platforms_takes_xla(arrays, expected):
    call = jax.jit(functools.partial(decode, implementation="xla"))
    exported = jax.export.export(call, platforms=["cpu", "cuda", "rocm", "tpu"])(*arrays)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(*arrays), expected)


def test_equal_shapes_do_not_retrace(arrays, options):
    traces = []

    @jax.jit
    def run(*arrays):
        traces.append(None)
        return decode(*arrays, **options)

    queries, pages, table, seq_lens = arrays
    for length in (700, 1, 0):
        run(queries, pages, table, seq_lens.at[0].set(length))
    run(-queries, pages + pages, table[::-1], seq_lens)
    assert len(traces) == 1


def test_query_len_below_the_maximum_shares_its_answer():
    """`max_decode_query_len` fixes the tile only."""
    case = Decode(seq_lens=(300, 129), query_len=2, max_query_len=4, topk=3, seed=202)
    inputs = decode_inputs(case)
    arrays = [jnp.asarray(inputs[name]) for name in ARRAYS]
    expected = calls.decode_oracle(case, inputs)[0]
    for longest in (2, 4, 8):
        options = statics(case, 300) | dict(max_decode_query_len=longest)
        np.testing.assert_array_equal(m3_pallas.minimax_m3_index_decode(*arrays, **options), expected)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_shard_map_over_heads_and_requests(arrays, expected, options):
    if options.get("interpret"):
        pytest.skip("JAX's Pallas interpreter does not run under shard_map")
    queries, pages, table, seq_lens = arrays
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec
    one_head = functools.partial(decode, **options, num_kv_heads=1)
    by_head = jax.shard_map(
        one_head, mesh=mesh, in_specs=(spec(None, "x"), spec(), spec(), spec()), out_specs=spec("x")
    )
    np.testing.assert_array_equal(jax.jit(by_head)(queries, pages, table, seq_lens), expected)

    def twice(x):
        return jnp.concatenate([x, x])

    by_request = jax.shard_map(
        functools.partial(decode, **options),
        mesh=mesh,
        in_specs=(spec("x"), spec(), spec("x"), spec("x")),
        out_specs=spec(None, "x"),
    )
    ids = jax.jit(by_request)(twice(queries), pages, twice(table), twice(seq_lens))
    np.testing.assert_array_equal(ids, np.concatenate([expected, expected], axis=1))


def test_without_jit():
    """`jax.disable_jit` runs loops in Python, on Python's own integers."""
    case = Decode(seq_lens=(130,), topk=2, dtype="f32", seed=300)
    chunk = Prefill(query_lens=(0, 2), prefix_lens=(5, 126), topk=2, dtype="f32", seed=301)
    with jax.disable_jit():
        np.testing.assert_array_equal(calls.decode(case, implementation="xla"), calls.decode_oracle(case)[0])
        np.testing.assert_array_equal(calls.prefill(chunk, implementation="xla")[1], calls.prefill_oracle(chunk)[1])
