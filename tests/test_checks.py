"""Bad input raises the same error with the argument's name and value, whichever implementation is asked for."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m3_pallas
from m3_pallas import policy
from m3_pallas.implementations import NAMES
from m3_pallas.triton import device

CHOICES = [dict(implementation=name, interpret=interpret) for name in (None, *NAMES) for interpret in (False, True)]
LAUNCH = policy.DecodeLaunch(
    score=policy.SplitScore(num_chunks=1),
    selection=policy.Selection(num_chunks=1, tile=64, num_warps=1, num_stages=1, single_tile=True),
)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


def decode_arguments():
    """R 3, T 6, H 1, D 16, P 5, N 4, B 4, K 2."""
    return dict(
        idx_q=jnp.zeros((6, 1, 16)), index_kv_cache=jnp.zeros((5, 128, 16)), block_table=i32(3, 4), seq_lens=i32(3),
        max_seq_len=512, topk=2, init_blocks=0, local_blocks=1, num_kv_heads=1, decode_query_len=2,
        max_decode_query_len=2,
    )  # fmt: skip


def score_arguments():
    return dict(
        idx_q=jnp.zeros((6, 1, 16)), index_kv_cache=jnp.zeros((5, 128, 16)), block_table=i32(3, 4),
        cu_seqlens_q=i32(4), seq_lens=i32(3), prefix_lens=i32(3), max_query_len=6, max_seq_len=512, num_kv_heads=1,
    )  # fmt: skip


def topk_arguments():
    return dict(
        score=jnp.zeros((2, 6, 16)), cu_seqlens_q=i32(4), prefix_lens=i32(3), max_query_len=6, topk=2, init_blocks=0,
        local_blocks=1,
    )  # fmt: skip


SHARED = [
    (dict(idx_q=jnp.zeros((6, 16))), ValueError, r"idx_q must be \[T, H, D\].*got shape \[6, 16\]"),
    (dict(idx_q=jnp.zeros((6, 1, 32))), ValueError, r"idx_q must be \[T, H, D\].*16\], got shape \[6, 1, 32\]"),
    (dict(idx_q=jnp.zeros((6, 2, 16))), ValueError, r"idx_q must have num_kv_heads = 1 heads, got shape \[6, 2, 16\]"),
    (dict(idx_q=i32(6, 1, 16)), TypeError, "idx_q must be one of .*, got int32"),
    (dict(idx_q=[1.0]), TypeError, "idx_q must be an array, got list"),
    (dict(index_kv_cache=jnp.zeros((5, 64, 16))), ValueError, r"index_kv_cache must be \[P, 128, D\].*\[5, 64, 16\]"),
    (dict(index_kv_cache=jnp.zeros((0, 128, 16))), ValueError, "index_kv_cache must have at least one page"),
    (dict(index_kv_cache=jnp.zeros((5, 128, 16), jnp.int8)), TypeError, "index_kv_cache must be one of .*, got int8"),
    (dict(block_table=i32(12)), ValueError, r"block_table must be \[R, N\].*got shape \[12\]"),
    (dict(block_table=jnp.zeros((3, 4), jnp.int16)), TypeError, "block_table must be int32, got int16"),
    (dict(seq_lens=i32(2)), ValueError, r"seq_lens must be \[R\] = \[3\], got shape \[2\]"),
    (dict(seq_lens=jnp.zeros(3)), TypeError, "seq_lens must be int32, got float32"),
    (dict(max_seq_len=0), ValueError, "max_seq_len must be at least 1, got 0"),
    (dict(max_seq_len=1.5), TypeError, "max_seq_len must be a static Python int, got 1.5"),
    (dict(num_kv_heads=0), ValueError, "num_kv_heads must be at least 1, got 0"),
]
SELECTION = [
    (dict(topk=0), ValueError, "topk must be at least 1, got 0"),
    (dict(init_blocks=-1), ValueError, "init_blocks must be at least 0, got -1"),
    (dict(local_blocks=-2), ValueError, "local_blocks must be at least 0, got -2"),
]
PREFILL = [
    (dict(cu_seqlens_q=i32(3)), ValueError, r"cu_seqlens_q must be \[R \+ 1\] = \[4\], got shape \[3\]"),
    (dict(prefix_lens=jnp.zeros(3)), TypeError, "prefix_lens must be int32, got float32"),
    (dict(prefix_lens=np.zeros(3, np.int64)), TypeError, "prefix_lens must be int32, got int64"),
    (dict(cu_seqlens_q="0 1 2 6"), TypeError, "cu_seqlens_q must be an array, got str"),
    (dict(max_query_len=-1), ValueError, "max_query_len must be at least 0, got -1"),
]
DECODE = [
    (dict(decode_query_len=0), ValueError, "decode_query_len must be at least 1, got 0"),
    (dict(decode_query_len=3), ValueError, "decode_query_len must be at most max_decode_query_len = 2, got 3"),
    (dict(idx_q=jnp.zeros((5, 1, 16))), ValueError, r"idx_q must have R \* decode_query_len = 3 \* 2 rows"),
    (dict(max_seq_len=65535 * 128), ValueError, "max_seq_len must be below .*got 8388480"),
    (dict(out=i32(1, 5, 2)), ValueError, r"out must have at least T = 6 rows, got shape \[1, 5, 2\]"),
    (dict(out=i32(1, 6, 3)), ValueError, r"out must be \[H, >=T, K\] = \[1, any, 2\], got shape \[1, 6, 3\]"),
    (dict(out=jnp.zeros((1, 6, 2))), TypeError, "out must be int32, got float32"),
    (dict(completion_counter=i32(1, 5)), ValueError, "completion_counter must have at least T = 6 rows"),
    (dict(attention_block_table=i32(3, 4)), ValueError, "go together, got only attention_block_table"),
    (dict(block_page_stride=8), ValueError, "go together, got only block_page_stride"),
    (dict(attention_block_table=i32(3, 4), block_page_stride=4), ValueError, "must be 8 or 16, got 4"),
    (dict(attention_block_table=i32(3, 3), block_page_stride=8), ValueError, r"at least B = 4 blocks wide.*\[3, 3\]"),
    (
        dict(attention_block_table=i32(3, 4), block_page_stride=8, num_kv_heads=2, idx_q=jnp.zeros((6, 2, 16))),
        ValueError,
        "attention_block_table needs one index head, got num_kv_heads = 2",
    ),
    (dict(seq_lens=jax.random.split(jax.random.key(0), 3)), TypeError, "seq_lens must be int32, got key<fry>"),
    (dict(launch=4), TypeError, "launch must be None or a DecodeLaunch, got 4"),
    (dict(launch=LAUNCH, max_seq_len=8320), ValueError, r"num_chunks \* tile of at least 65 blocks, got 1 \* 64"),
    (dict(launch=LAUNCH, topk=65), ValueError, "tile must be at least topk = 65, got 64"),
]
TOPK = [
    (dict(score=jnp.zeros((6, 16))), ValueError, r"score must be \[H, T, S\].*got shape \[6, 16\]"),
    (dict(score=jnp.zeros((2, 6, 16), jnp.bfloat16)), TypeError, "score must be float32, got bfloat16"),
    (dict(out=i32(2, 5, 2)), ValueError, "out must have at least T = 6 rows"),
]
BOUND = [(dict(max_seq_len=2**30 + 1), ValueError, "max_seq_len must be at most 1073741824, got 1073741825")]
OPTIONS = [
    (dict(implementation="cuda"), ValueError, "'xla', 'pallas_triton', 'pallas_mosaic_tpu', got 'cuda'"),
    (dict(implementation=np.zeros(2)), ValueError, r"'pallas_mosaic_tpu', got array\(\[0., 0.\]\)"),
    (dict(interpret=1), TypeError, "interpret must be a bool, got 1"),
]
CALLS = {
    "decode": (m3_pallas.minimax_m3_index_decode, decode_arguments, SHARED + SELECTION + DECODE),
    "score": (m3_pallas.minimax_m3_index_score, score_arguments, SHARED + PREFILL + BOUND),
    "prefill": (
        m3_pallas.minimax_m3_index_prefill,
        lambda: score_arguments() | dict(topk=2, init_blocks=0, local_blocks=1),
        SHARED + PREFILL + BOUND + SELECTION + [(dict(out=i32(1, 5, 2)), ValueError, "out must have at least T = 6")],
    ),
    "topk": (m3_pallas.minimax_m3_index_topk, topk_arguments, SELECTION + PREFILL + TOPK),
}
BAD = [
    pytest.param(call, arguments() | changes, error, message, id=f"{name}-{'-'.join(changes)}-{error.__name__}-{i}")
    for name, (call, arguments, table) in CALLS.items()
    for i, (changes, error, message) in enumerate(table + OPTIONS)
]


@pytest.mark.parametrize(("call", "arguments", "error", "message"), BAD)
def test_bad_input(call, arguments, error, message):
    for choice in CHOICES:
        with pytest.raises(error, match=message):
            call(**choice | arguments)
    arrays = {k: v for k, v in arguments.items() if isinstance(v, jax.Array)}
    statics = {k: v for k, v in arguments.items() if k not in arrays}
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(call, **statics), **arrays)


@pytest.mark.parametrize("name", CALLS)
def test_good_input(name):
    """What the bad inputs were changed from is accepted."""
    call, arguments, _ = CALLS[name]
    call(**arguments())


def test_traced_bound_is_a_type_error():
    arguments = decode_arguments()
    arguments.pop("max_seq_len")
    with pytest.raises(TypeError, match="max_seq_len must be a static Python int"):
        jax.jit(lambda n: m3_pallas.minimax_m3_index_decode(**arguments, max_seq_len=n))(512)


def test_named_implementation_that_cannot_serve():
    decode = functools.partial(m3_pallas.minimax_m3_index_decode, **decode_arguments() | dict(topk=65))
    with pytest.raises(NotImplementedError, match=r"pallas_triton.*topk 65 is above 64; use None or 'xla'"):
        decode(implementation="pallas_triton", interpret=True)
    assert decode().shape == (1, 6, 65)  # None serves all the same


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it can serve there")
@pytest.mark.parametrize("name", ["pallas_triton", "pallas_mosaic_tpu"])
def test_named_implementation_on_another_platform(name):
    with pytest.raises(NotImplementedError, match=f"{name}.*use"):
        m3_pallas.minimax_m3_index_decode(**decode_arguments(), implementation=name)


def test_a_jax_without_pallas_triton():
    """None falls back to XLA; the named choice says what to do."""
    arguments = decode_arguments() | dict(topk=7)  # traced nowhere else
    with mock.patch.object(device, "plgpu", None):
        assert m3_pallas.minimax_m3_index_decode(**arguments).shape == (1, 6, 7)
        for interpret in (False, True):
            with pytest.raises(NotImplementedError, match="has no Pallas Triton backend; use None or 'xla'"):
                m3_pallas.minimax_m3_index_decode(**arguments, implementation="pallas_triton", interpret=interpret)


def test_insert_refuses():
    cache = m3_pallas.IndexCache.empty(2, 16)
    keys, slots = jnp.zeros((3, 16)), i32(3)
    for arguments, error, message in [
        ((cache.pages, keys, slots), TypeError, "cache must be an IndexCache, got "),
        ((cache, jnp.zeros((3, 8)), slots), ValueError, r"index_k must be \[tokens, D\].*\[3, 8\]"),
        ((cache, i32(3, 16), slots), TypeError, "index_k must be floating point, got int32"),
        ((cache, keys, i32(2)), ValueError, r"slot_mapping must be \[tokens\] = \[3\], got shape \[2\]"),
        ((cache, keys, jnp.zeros(3)), TypeError, "slot_mapping must be int32, got float32"),
    ]:
        with pytest.raises(error, match=message):
            m3_pallas.insert_index_cache(*arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: policy.DecodeLaunch(score=None, selection=None),
            TypeError,
            "launch: score must be a BalancedScore or",
        ),
        (lambda: policy.DecodeLaunch(score=LAUNCH.score, selection=4), TypeError, "launch: selection must be .*got 4"),
        (lambda: policy.BalancedScore(budget=1.5), TypeError, "budget must be an int, got 1.5"),
        (lambda: policy.SplitScore(num_chunks=0), ValueError, "num_chunks must be at least 1, got 0"),
        (lambda: policy.SplitScore(num_chunks=2, num_warps=-3), ValueError, "num_warps must be at least 1, got -3"),
        (lambda: policy.ScoreLaunch(rows=48, num_chunks=1), ValueError, "rows must be a power of two, got 48"),
        (lambda: policy.ScoreLaunch(rows=32, num_chunks=1, num_stages=0), ValueError, "num_stages must be at least 1"),
        (
            lambda: policy.Selection(num_chunks=1, tile=64, num_warps=6, num_stages=None),
            ValueError,
            "num_warps must be a power of two, got 6",
        ),
    ],
)
def test_launches_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


VALUES = [
    (dict(), None),
    (dict(seq_lens=[300, -1]), r"seq_lens\[1\] = -1 is negative"),
    (dict(seq_lens=[300, 513]), r"seq_lens\[1\] = 513 is above max_seq_len = 512"),
    (dict(seq_lens=[300, 500], max_seq_len=512, block_table=[[0, 1, 2]] * 2), r"seq_lens\[1\] = 500 is above the 384"),
    (dict(block_table=[[0, 1, 2, 9], [3, 4, 5, 9]]), r"block_table\[1, 2\] = 5 is outside the cache's 5 pages"),
    (dict(block_table=[[0, -1, 2, 9], [3, 4, 0, 9]]), r"block_table\[0, 1\] = -1 is outside"),
    (dict(cu_seqlens_q=[0, 10, 40], prefix_lens=[290, 230]), None),
    (dict(cu_seqlens_q=[0, 10, 40]), "go together, got only cu_seqlens_q"),
    (dict(cu_seqlens_q=[1, 10, 40], prefix_lens=[290, 230]), r"cu_seqlens_q\[0\] = 1 is not 0"),
    (dict(cu_seqlens_q=[0, 10, 9], prefix_lens=[290, 230]), r"cu_seqlens_q\[2\] = 9 is below cu_seqlens_q\[1\] = 10"),
    (dict(cu_seqlens_q=[0, 10, 40], prefix_lens=[-1, 230]), r"prefix_lens\[0\] = -1 is negative"),
    (
        dict(cu_seqlens_q=[0, 10, 40], prefix_lens=[290, 231]),
        r"prefix_lens\[1\] = 231 and a query of 30 tokens do not add up to seq_lens\[1\] = 260",
    ),
]


@pytest.mark.parametrize(("changes", "message"), VALUES)
def test_check_values(changes, message):
    arguments = dict(block_table=[[0, 1, 2, 2**30], [3, 4, 0, -7]], seq_lens=[300, 260]) | changes
    bounds = dict(num_pages=5, max_seq_len=arguments.pop("max_seq_len", 512))
    arrays = {name: np.asarray(value, np.int32) for name, value in arguments.items()}
    if message is None:
        m3_pallas.check_values(**arrays, **bounds)
        return
    with pytest.raises(ValueError, match=message):
        m3_pallas.check_values(**arrays, **bounds)


@pytest.mark.parametrize("bound", ["num_pages", "max_seq_len"])
def test_check_values_of_bounds(bound):
    bounds = dict(num_pages=5, max_seq_len=512) | {bound: "x"}
    with pytest.raises(TypeError, match=f"{bound} must be a static Python int, got 'x'"):
        m3_pallas.check_values(np.zeros((1, 4), np.int32), np.zeros(1, np.int32), **bounds)


def test_check_values_needs_concrete_arrays():
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.jit(lambda x: m3_pallas.check_values(x, i32(1), num_pages=1, max_seq_len=1))(i32(1, 1))
