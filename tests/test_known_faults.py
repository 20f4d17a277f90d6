"""Faults that systems of this kind had in public, by the number of their report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m3_pallas
from m3_pallas import IndexCache, reference
from m3_pallas.measure import calls
from m3_pallas.measure.cases import Decode, Prefill, decode_inputs, prefill_inputs

NAN, INF = np.nan, np.inf


def select(scores, topk, *, init_blocks=0, local_blocks=0, **options):
    """`minimax_m3_index_topk` on one row that sees all of `scores`."""
    score = jnp.asarray(scores, jnp.float32)[None, None]
    blocks = score.shape[2]
    ids = m3_pallas.minimax_m3_index_topk(
        score, jnp.array([0, 1], jnp.int32), jnp.array([blocks * 128 - 1], jnp.int32), 1, topk, init_blocks,
        local_blocks, **options,
    )  # fmt: skip
    return ids[0, 0].tolist()


def decode_blocks(values, topk, *, init_blocks=0, local_blocks=0, **options):
    """Decode of one request whose blocks score `values` exactly: one nonzero key a block, D 16."""
    pages = np.full((len(values), 128, 16), -INF, np.float32)
    pages[:, :, 1:] = 0
    pages[:, 77, 0] = values
    query = jnp.zeros((1, 1, 16)).at[0, 0, 0].set(1.0)
    blocks = len(values)
    ids = m3_pallas.minimax_m3_index_decode(
        query, jnp.asarray(pages), jnp.arange(blocks, dtype=jnp.int32)[None], jnp.array([blocks * 128], jnp.int32),
        blocks * 128, topk, init_blocks, local_blocks, 1, 1, 1, **options,
    )  # fmt: skip
    return ids[0, 0].tolist()


def check_decode(case, inputs=None, **options):
    inputs = decode_inputs(case) if inputs is None else inputs
    np.testing.assert_array_equal(calls.decode(case, inputs, **options), calls.decode_oracle(case, inputs)[0])


def check_prefill(case, inputs=None, **options):
    inputs = prefill_inputs(case) if inputs is None else inputs
    score, ids = calls.prefill(case, inputs, **options)
    expected, expected_ids = calls.prefill_oracle(case, inputs)
    calls.assert_scores(score, expected, calls.score_tolerance(inputs["idx_q"], inputs["index_kv_cache"]))
    np.testing.assert_array_equal(ids, expected_ids)
    return score, ids


ORDERS = {
    "jax 2124 signed zeros": ([0.0, -0.0, 0.0], 3, [0, 1, 2]),
    "triton 10291 NaN": ([NAN, 1.0], 2, [1, 0]),
    "torch-xpu 4839 all NaN": ([NAN] * 5, 4, [0, 1, 2, 3]),
    "MSA 6 all 32 bits": ([1.0, 1.0 + 2**-12, np.nextafter(np.float32(1), np.float32(2))], 3, [1, 2, 0]),
    "sglang 35257 constant row": ([1.0] * 300, 16, list(range(16))),
    "infinities": ([-INF, 3.0, INF, -INF], 4, [2, 1, 0, 3]),
    "vllm-ascend 13177 fewer blocks than K": ([4.0], 16, [0] + [-1] * 15),
    "K 1": ([1.0, 3.0, 2.0], 1, [1]),
    "K 3": ([1.0, 3.0, 2.0, 5.0], 3, [3, 1, 2]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order(name, options):
    scores, topk, expected = ORDERS[name]
    assert select(scores, topk, **options) == expected


@pytest.mark.parametrize("name", ORDERS)
def test_order_in_decode(name, options):
    scores, topk, expected = ORDERS[name]
    assert decode_blocks(scores[:32], topk, **options) == expected


def test_forced_blocks_are_not_cut_off(options):
    """sglang #38232: more blocks than K, the local block last."""
    scores = np.arange(40, 0, -1)
    assert select(scores, 4, local_blocks=1, **options) == [39, 0, 1, 2]
    assert select(scores, 4, init_blocks=2, local_blocks=1, **options) == [0, 1, 39, 2]
    assert select(scores, 2, init_blocks=3, local_blocks=1, **options) == [0, 1]


def test_forced_blocks_are_not_cut_off_in_decode(options):
    scores = np.arange(20, 0, -1)
    assert decode_blocks(scores, 4, init_blocks=2, local_blocks=1, **options) == [0, 1, 19, 2]
    assert decode_blocks([1.0, INF, 2.0], 3, local_blocks=1, **options) == [1, 2, 0]


def test_constant_row_of_4096_blocks():
    """sglang #35257, #36807, vllm #55314"""
    assert select(np.full(4096, 0.5), 16, local_blocks=1) == [4095, *range(15)]


def test_heads_select_for_themselves(options):
    """transformers #46762; T = H = 4 makes [H, T, K] and [T, H, K] look alike."""
    check_decode(Decode(seq_lens=(2000, 1500, 900, 2560), heads=4, topk=4, seed=100), **options)


def test_heads_select_for_themselves_in_prefill(options):
    check_prefill(Prefill(query_lens=(4,), prefix_lens=(1900,), heads=4, topk=4, seed=101), **options)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 16])
def test_any_number_of_heads(heads, options):
    """aiter #5464, ATOM #1334"""
    check_decode(Decode(seq_lens=(700, 300), heads=heads, topk=3, seed=102, head_dim=64), **options)


def test_padded_rows_are_all_minus_one(options):
    """vllm #39391, #39244, #39643: every column, and nothing of the NaN pages they point to."""
    case = Decode(seq_lens=(0, 300, 0), topk=5, heads=2, seed=103)
    inputs = decode_inputs(case)
    unused = np.setdiff1d(np.arange(inputs["index_kv_cache"].shape[0]), inputs["block_table"][1, :3])
    inputs["block_table"][[0, 2]] = unused[0]  # a NaN page
    ids = calls.decode(case, inputs, out=jnp.full((2, 3, 5), 9, jnp.int32), **options)
    np.testing.assert_array_equal(ids[:, [0, 2]], -1)
    np.testing.assert_array_equal(ids, calls.decode_oracle(case, inputs)[0])


def test_stale_pages_and_table_entries(options):
    """Unused entries of 2**30, -1 and of pages that hold NaN; NaN after the last token of a page."""
    case = Decode(seq_lens=(129, 5, 256), topk=3, seed=104)
    inputs = decode_inputs(case)
    for request, used in enumerate((2, 1, 2)):
        inputs["block_table"][request, used:] = (-1, 2**30, -(2**31))[request]
    check_decode(case, inputs, **options)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_long_context(name):
    """sglang #36560, #38615: a hidden cap at 4096 blocks; vllm #46074: off by one past 325,000 tokens."""
    lengths = (128 * 8192, 325_001)
    if name == "decode":
        check_decode(Decode(seq_lens=lengths, pages=16, seed=105, head_dim=16))
        return
    case = Prefill(query_lens=(1, 1), prefix_lens=tuple(n - 1 for n in lengths), head_dim=16, seed=106)
    inputs = prefill_inputs(Prefill(query_lens=(1, 1), prefix_lens=(1000, 500), head_dim=16, seed=106))
    rng = np.random.default_rng(0)
    inputs |= dict(
        block_table=rng.integers(0, 4, (2, 8192)).astype(np.int32),
        index_kv_cache=np.nan_to_num(inputs["index_kv_cache"]),
        seq_lens=np.asarray(lengths, np.int32),
        prefix_lens=np.asarray(case.prefix_lens, np.int32),
        max_seq_len=lengths[0],
    )
    check_prefill(case, inputs)


@pytest.mark.parametrize("seq_lens", [(129, 0), (0, 0), (129,), (2,), (3, 4, 127, 128, 130, 131)], ids=str)
def test_speculative_rows(seq_lens, options):
    """vllm #49054; rows that cross a block, and requests shorter than the query."""
    case = Decode(seq_lens=seq_lens, query_len=4, max_query_len=4, topk=3, seed=108)
    check_decode(case, **options)
    if seq_lens == (129,):
        assert (np.asarray(calls.decode(case, **options))[0] >= 0).sum(-1).tolist() == [1, 1, 1, 2]
    if seq_lens == (2,):
        assert (np.asarray(calls.decode(case, **options))[0] >= 0).sum(-1).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dirty", [0, 7, -1, 2**31 - 1])
def test_dirty_counter(dirty, options):
    case = Decode(seq_lens=(3000, 129, 0), topk=4, heads=2, seed=109)
    inputs = decode_inputs(case)
    counter = jnp.full((2, 5), dirty, jnp.int32)
    result = calls.decode(case, inputs, completion_counter=counter, **options)
    np.testing.assert_array_equal(result.topk_idx, calls.decode_oracle(case, inputs)[0])
    np.testing.assert_array_equal(result.completion_counter, np.array([[0, 0, 0, dirty, dirty]] * 2))


@pytest.mark.parametrize("query", ["bf16", "f16", "e4m3fn"])
@pytest.mark.parametrize("cache", ["bf16", "e4m3fn", "f16"])
def test_mixed_dtypes(query, cache, options):
    """vllm #47665, ATOM #1473: what the product needs is upcast."""
    cases = [Decode(seq_lens=(700, 130), heads=2, topk=3, dtype=dtype, seed=110) for dtype in (query, cache)]
    inputs = decode_inputs(cases[1]) | dict(idx_q=decode_inputs(cases[0])["idx_q"])
    check_decode(cases[1], inputs, **options)


PREFILLS = {
    "prefix 127": Prefill(query_lens=(3,), prefix_lens=(127,)),
    "prefix 128": Prefill(query_lens=(3,), prefix_lens=(128,)),
    "prefix 129": Prefill(query_lens=(3,), prefix_lens=(129,)),
    "tile across requests": Prefill(query_lens=(40, 1, 50), prefix_lens=(0, 1000, 130)),
    "empty between": Prefill(query_lens=(30, 0, 5), prefix_lens=(500, 700, 0)),
    "empty first and last": Prefill(query_lens=(0, 7, 0), prefix_lens=(300, 200, 0)),
    "float32": Prefill(query_lens=(9,), prefix_lens=(250,), dtype="f32", head_dim=64, heads=3),
}


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_lengths(name, options):
    check_prefill(PREFILLS[name], **options)


def test_prefill_padding(options):
    """Rows past the last request, and columns past each row's position, are exactly -inf, then -1."""
    case = Prefill(query_lens=(5, 3), prefix_lens=(250, 0), topk=4, heads=2, seed=111)
    inputs = prefill_inputs(case)
    inputs["idx_q"] = np.concatenate([inputs["idx_q"], np.full_like(inputs["idx_q"][:4], NAN)])
    score, ids = check_prefill(case, inputs, **options)
    assert np.isneginf(np.asarray(score[:, 8:])).all()
    assert (np.asarray(ids[:, 8:]) == -1).all()


@pytest.mark.parametrize(("tokens", "requests"), [(0, 0), (0, 2)])
def test_no_tokens(tokens, requests, options):
    zeros = jnp.zeros(requests, jnp.int32)
    starts = jnp.zeros(requests + 1, jnp.int32)
    queries, pages = jnp.zeros((tokens, 2, 16)), jnp.full((1, 128, 16), NAN)
    table = jnp.zeros((requests, 3), jnp.int32)
    score = m3_pallas.minimax_m3_index_score(queries, pages, table, starts, zeros, zeros, 0, 384, 2, **options)
    assert score.shape == (2, tokens, 16)
    ids = m3_pallas.minimax_m3_index_topk(score, starts, zeros, 0, 4, 0, 1, **options)
    assert ids.shape == (2, tokens, 4)
    if requests == 0:
        ids = m3_pallas.minimax_m3_index_decode(queries, pages, table, zeros, 384, 4, 0, 1, 2, 1, 1, **options)
        assert ids.shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("name", "value"), [("seq_lens", 2**31 - 1), ("seq_lens", -5), ("block_table", 2**31 - 1), ("block_table", -1)]
)
def test_callers_hazards_stay_inside(name, value, options):
    """A wild length or page gives ids inside the table, and leaves the other requests alone."""
    case = Decode(seq_lens=(300, 700), topk=3, seed=112)
    inputs = decode_inputs(case)
    expected = calls.decode_oracle(case, inputs)[0]
    inputs[name][0] = value
    ids = np.asarray(calls.decode(case, inputs, **options))
    np.testing.assert_array_equal(ids[:, 1], expected[:, 1])
    assert ids.min() >= -1
    assert ids.max() < inputs["block_table"].shape[1]


@pytest.mark.parametrize("slot", [1000 * 128, -1])
def test_slot_outside_the_cache(slot):
    """vllm #54296, TRT-LLM #18673, sglang-jax #1376"""
    cache = IndexCache(jnp.ones((2, 128, 16)))
    result = m3_pallas.insert_index_cache(cache, jnp.full((1, 16), 5.0), jnp.array([slot], jnp.int32))
    np.testing.assert_array_equal(result.pages, cache.pages)


def test_x64():
    """jax #18847"""
    case = Decode(seq_lens=(2000, 300), heads=2, topk=4, seed=113)
    with jax.enable_x64(True):
        for options in (dict(), dict(implementation="pallas_triton", interpret=True)):
            ids = calls.decode(case, **options)
            assert ids.dtype == jnp.int32
            np.testing.assert_array_equal(ids, calls.decode_oracle(case)[0])
        check_prefill(Prefill(query_lens=(9, 3), prefix_lens=(130, 0), seed=114))


def test_oracle_on_order():
    """The table above says what the oracle says."""
    for scores, topk, expected in ORDERS.values():
        ids = reference.select(np.asarray(scores, np.float32), topk)
        assert ids == [block for block in expected if block >= 0]
