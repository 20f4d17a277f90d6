"""Launches worked out by hand from vLLM's policy, and the coverage of its splits."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_pallas import policy
from m3_pallas.policy import BalancedScore, DecodeLaunch, Selection, SplitScore, TopkLaunch

BASE = dict(
    arch="gfx950",
    requests=1,
    heads=1,
    tokens=1,
    num_blocks=1024,
    topk=16,
    head_dim=128,
    query_dtype="bfloat16",
    cache_dtype="bfloat16",
    max_decode_query_len=1,
)
BALANCED, SPLIT = "balanced", "split"

# changes to BASE; kind, budget or chunks, warps, stages
SCORES = [
    (dict(requests=1), (BALANCED, 1024, 2, 1)),
    (dict(requests=8), (BALANCED, 1024, 2, 1)),
    (dict(requests=9), (BALANCED, 768, 2, 1)),
    (dict(requests=11), (BALANCED, 768, 2, 1)),
    (dict(requests=12), (SPLIT, 32, None, None)),  # 512 // 12 = 42
    (dict(requests=19), (SPLIT, 16, None, None)),  # 26
    (dict(requests=20), (SPLIT, 32, 2, 1)),  # 1024 // 20 = 51
    (dict(requests=64), (SPLIT, 16, 2, 1)),
    (dict(requests=65), (SPLIT, 4, None, None)),  # 7
    (dict(requests=600), (SPLIT, 1, None, None)),
    (dict(requests=8, heads=4, max_decode_query_len=4), (BALANCED, 1024, 2, 1)),
    (dict(requests=32, heads=4, max_decode_query_len=4), (SPLIT, 32, 4, 2)),
    (dict(requests=100, heads=2, max_decode_query_len=2), (SPLIT, 4, 4, 2)),
    (dict(requests=32, heads=1, max_decode_query_len=4), (SPLIT, 32, 2, 1)),
    (dict(arch="gfx942", requests=1), (SPLIT, 256, None, None)),  # 512, at most 256
    (dict(arch="gfx942", requests=3), (SPLIT, 128, None, None)),  # 170
    (dict(arch="gfx942", requests=32), (SPLIT, 16, None, None)),
    (dict(requests=1, head_dim=64), (SPLIT, 256, None, None)),
    (dict(requests=32, cache_dtype="float8_e4m3fn"), (SPLIT, 16, None, None)),
    (dict(requests=32, query_dtype="float16"), (SPLIT, 16, None, None)),
]


@pytest.mark.parametrize(("changes", "expected"), SCORES, ids=str)
def test_amd_score(changes, expected):
    score = policy.decode_launch(**BASE | changes).score
    balanced = isinstance(score, BalancedScore)
    number = score.budget if balanced else score.num_chunks
    assert (BALANCED if balanced else SPLIT, number, score.num_warps, score.num_stages) == expected


# changes to BASE; chunks, tile, warps, stages, single-tile and adaptive
SELECTIONS = [
    (dict(num_blocks=1), (1, 128, 2, 1, True)),
    (dict(num_blocks=128), (1, 128, 2, 1, True)),
    (dict(num_blocks=129), (16, 512, 4, 2, True)),
    (dict(num_blocks=8192), (16, 512, 4, 2, True)),
    (dict(num_blocks=8193), (16, 512, 8, 2, False)),
    (dict(topk=8), (16, 512, 8, 2, False)),
    (dict(topk=8, tokens=4), (16, 512, 8, 2, False)),  # 64 // 4
    (dict(topk=8, tokens=5), (8, 512, 8, 2, False)),  # 12
    (dict(topk=8, tokens=10, heads=4), (1, 512, 8, 2, False)),
    (dict(topk=8, tokens=100), (1, 512, 8, 2, False)),
    (dict(arch="gfx942"), (16, 512, 8, 2, False)),
    (dict(arch="gfx942", tokens=32), (2, 512, 8, 2, False)),
]


@pytest.mark.parametrize(("changes", "expected"), SELECTIONS, ids=str)
def test_amd_selection(changes, expected):
    chunks, tile, warps, stages, fast = expected
    assert policy.decode_launch(**BASE | changes).selection == Selection(
        num_chunks=chunks, tile=tile, num_warps=warps, num_stages=stages, single_tile=fast, adaptive_merge=fast
    )


@pytest.mark.parametrize(
    ("num_blocks", "chunks", "tile", "used"),
    [(0, 16, 512, 1), (1, 16, 512, 1), (512, 16, 512, 1), (513, 16, 512, 2), (8192, 16, 512, 16), (9000, 16, 512, 16)],
)
def test_selection_chunks(num_blocks, chunks, tile, used):
    launch = Selection(num_chunks=chunks, tile=tile, num_warps=None, num_stages=None)
    assert policy.selection_chunks(num_blocks, launch) == used


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90", "sm_100"])
@pytest.mark.parametrize("num_blocks", [1, 64, 100, 1024, 8193, 65534])
@pytest.mark.parametrize("topk", [1, 16, 64])
def test_every_launch_can_hold_its_row(arch, num_blocks, topk):
    policy.decode_launch(**BASE | dict(arch=arch, num_blocks=num_blocks, topk=topk)).selection.check(num_blocks, topk)


@pytest.mark.parametrize("requests", [1, 7, 64, 256, 1000])
def test_nvidia_programs_fit_at_once(requests):
    """Four programs on each of 132 multiprocessors, or three of more than eight columns; or one a request."""
    for heads, resident in ((1, 528), (4, 528), (16, 396)):
        score = policy.decode_launch(**BASE | dict(arch="sm_90", requests=requests, heads=heads, tokens=requests)).score
        assert isinstance(score, SplitScore)
        assert score.num_chunks * requests <= max(resident, requests)
        assert (score.num_chunks + 1) * requests > resident


@pytest.mark.parametrize(
    ("requests", "num_blocks", "query_len", "score", "selection"),
    [
        (1, 32, 1, (32, 4, 1), (32, 1)),  # a program a block
        (1, 64, 1, (64, 4, 1), (64, 2)),
        (1, 1024, 1, (528, 8, 2), (1024, 4)),  # two blocks at most
        (1, 1024, 4, (528, 4, 2), (1024, 4)),
        (1, 2048, 1, (528, 4, 2), (2048, 4)),
        (4, 264, 1, (132, 8, 2), (512, 2)),
        (4, 265, 1, (132, 4, 2), (512, 2)),
        (200, 1024, 1, (2, 4, 2), (1024, 2)),  # rows enough to fill the GPU
        (16, 8192, 1, (33, 4, 2), (8192, 8)),
    ],
)
def test_nvidia_table(requests, num_blocks, query_len, score, selection):
    launch = policy.decode_launch(
        **BASE | dict(arch="sm_90", requests=requests, heads=1, tokens=requests * query_len, num_blocks=num_blocks,
                      max_decode_query_len=query_len)
    )  # fmt: skip
    assert (launch.score.num_chunks, launch.score.num_warps, launch.score.num_stages) == score
    assert (launch.selection.tile, launch.selection.num_warps) == selection
    assert launch.selection.num_chunks == 1


def test_nvidia_tile_holds_all_winners():
    launch = policy.decode_launch(**BASE | dict(arch="sm_90", num_blocks=32, topk=64))
    assert (launch.selection.tile, launch.selection.num_warps) == (64, 2)


lengths = st.lists(
    st.one_of(st.just(0), st.just(65534), st.integers(0, 65534), st.integers(0, 40)), min_size=1, max_size=11
)


@given(lengths)
def test_balanced_split_owns_every_block_once(num_blocks):
    budget = policy.BALANCED_BUDGET_FEW if len(num_blocks) <= 8 else policy.BALANCED_BUDGET_MORE
    owned = list(policy.balanced_ranges(num_blocks, budget))
    assert len(owned) <= policy.balanced_grid(budget, len(num_blocks))
    for request, blocks in enumerate(num_blocks):
        end = 0
        for owner, first, last in owned:
            if owner == request:
                assert first == end < last
                end = last
        assert end == blocks
    assert max((last - first for _, first, last in owned), default=0) <= max(1, -(-sum(num_blocks) // budget))


@given(st.integers(0, 65534), st.sampled_from([1, 2, 12, 64, 256]))
def test_even_split_owns_every_block_once(num_blocks, num_chunks):
    ranges = list(policy.split_ranges(num_blocks, num_chunks))
    assert len(ranges) == num_chunks
    assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == num_blocks
    assert max(end - first for first, end in ranges) == -(-num_blocks // num_chunks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SplitScore(num_chunks=0), "num_chunks must be at least 1, got 0"),
        (lambda: BalancedScore(budget=0), "budget must be at least 1, got 0"),
        (lambda: SplitScore(num_chunks=1, min_columns=3), "min_columns must be a power of two, got 3"),
        (lambda: SplitScore(num_chunks=1, tile_tokens=32), "tile_tokens must be 64 or 128, got 32"),
        (
            lambda: Selection(num_chunks=3, tile=64, num_warps=1, num_stages=1),
            "num_chunks must be a power of two, got 3",
        ),
        (lambda: TopkLaunch(groups=48, tile=256), "groups must be a power of two, got 48"),
        (lambda: TopkLaunch(groups=32, tile=0), "tile must be at least 1, got 0"),
        (lambda: Selection(num_chunks=1, tile=100, num_warps=1, num_stages=1), "tile must be a power of two, got 100"),
    ],
)
def test_launches_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_selection_names_its_backend():
    with pytest.raises(TypeError, match="num_warps"):
        Selection(num_chunks=1, tile=64)  # pyright: ignore[reportCallIssue]


def test_launches_are_static_arguments():
    """Hashable and comparable by value, so that equal launches do not retrace."""
    launch = policy.decode_launch(**BASE)
    assert launch == DecodeLaunch(score=launch.score, selection=dataclasses.replace(launch.selection))
    assert hash(launch) == hash(policy.decode_launch(**BASE))


@pytest.mark.parametrize(
    ("arch", "topk", "groups", "warps", "candidates"),
    [("sm_90", 1, 32, 1, 64), ("sm_90", 16, 32, 1, 64), ("sm_90", 17, 32, 4, 128), ("sm_90", 64, 32, 8, 256),
     ("gfx942", 16, 64, 1, 128), ("gfx950", 32, 64, 1, 128), ("gfx950", 33, 64, 8, 256)],
)  # fmt: skip
def test_prefill_topk(arch, topk, groups, warps, candidates):
    """A lane a group while K leaves half of the groups over; twice as many candidates as groups, and four times K."""
    launch = policy.prefill_topk_launch(arch=arch, topk=topk)
    assert launch == TopkLaunch(groups=groups, tile=256, num_warps=warps, num_stages=1)
    assert policy.topk_candidates(groups, topk) == candidates


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_even_pieces_repeat_little(total, limit):
    size = policy.even_size(total, limit)
    pieces = policy.ceil_div(total, size)
    assert size <= limit
    assert pieces == policy.ceil_div(total, limit)
    assert pieces * size - total < pieces
