"""Launch policies of the GPU kernels: pure functions of shapes, dtypes and architecture. Imports no jax.

On `gfx*` architectures decode's mirror vLLM 0.32.0's, number for number. Dtypes are names ("bfloat16"), architectures
are strings ("gfx950", "gfx942", "sm_90").
Legend: R requests, T query tokens, H index heads, D head dim, B blocks of the longest sequence, K selected blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

BALANCED_MAX_REQUESTS = 11
BALANCED_FEW_REQUESTS = 8  # up to here the larger budget
BALANCED_BUDGET_FEW = 1024
BALANCED_BUDGET_MORE = 768
SPLIT_TARGET_GRID = 512
HIGH_BATCH_TARGET_GRID = 1024
HIGH_BATCH_REQUESTS = (20, 64)  # first and last
MAX_SPLIT_CHUNKS = 256
SELECTION_TARGET_GRID = 64
SELECTION_TILE = 512
SELECTION_MAX_CHUNKS = 16
SHORT_SELECTION_TILE = 128
AMD_MATRIX_COLUMNS = 16

# NVIDIA, measured on an H200 (benchmarks/LOG.md): 132 multiprocessors.
NVIDIA_MIN_COLUMNS = 8  # through the matrix unit: 5% faster for one column than multiplying and adding
NVIDIA_RESIDENT = 528  # 4 programs a multiprocessor run at once; a second wave costs 3%
NVIDIA_RESIDENT_WIDE = 396  # 3, with more than 8 columns
NVIDIA_ONE_BLOCK_PROGRAMS = 528  # up to here every block has a program of its own
NVIDIA_TWO_BLOCK_PROGRAMS = 1056  # up to here it has at most two; nothing to pipeline, so more warps: 2 to 4% faster
NVIDIA_MIN_TILE = 32
NVIDIA_MAX_TILE = 8192  # blocks of one selection program; beyond, chunks and a merge

PREFILL_ROWS = 128  # of one product
PREFILL_FULL_ROWS = 32
PREFILL_PROGRAMS = 512  # at least so many, two for each place an H200 has; else the blocks are split
PREFILL_PROGRAMS_LONG = 1024  # from this many blocks on, where a program's start weighs less
PREFILL_LONG_BLOCKS = 512
PREFILL_TOPK_TILE = 256
PREFILL_TOPK_GROUPS = 32  # the lanes of a warp
PREFILL_TOPK_GROUPS_AMD = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """What all launches have.

    Attributes:
      num_warps, num_stages: of the backend; None is its default.
    """

    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self):
        if self.num_warps is not None:
            _power_of_two("num_warps", self.num_warps)
        if self.num_stages is not None:
            _positive("num_stages", self.num_stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Score(_Launch):
    """What both score launches of decode have, beside `num_warps` and `num_stages`.

    Attributes:
      min_columns: least width of the product's query side. A lone column is multiplied and added without the matrix
        unit; padded to 8 or 16 it goes through it.
      tile_tokens: keys of a page that one step loads, 128 or 64. Fewer need less on-chip memory for each stage.
    """

    min_columns: int = 1
    tile_tokens: int = 128

    def __post_init__(self):
        super().__post_init__()
        _power_of_two("min_columns", self.min_columns)
        if self.tile_tokens not in (64, 128):
            raise ValueError(f"tile_tokens must be 64 or 128, got {self.tile_tokens!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalancedScore(_Score):
    """Score launch that deals every visible block of every request to a fixed budget of programs.

    Attributes:
      budget: programs to spread the blocks over; the grid is `budget + R - 1`.
    """

    budget: int

    def __post_init__(self):
        super().__post_init__()
        _positive("budget", self.budget)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitScore(_Score):
    """Score launch that cuts each request into the same number of chunks: grid `[R, num_chunks]`."""

    num_chunks: int

    def __post_init__(self):
        super().__post_init__()
        _positive("num_chunks", self.num_chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection(_Launch):
    """Top-k launch: grid `[T, H, num_chunks]`, the last program of a row to arrive merges.

    Attributes:
      num_chunks: programs a row may use.
      tile: blocks a program ranks at a time.
      num_warps, num_stages: of the backend; None is its default.
      single_tile: every chunk is known to fit one tile.
      adaptive_merge: the merge is as wide as the chunks in use, not as `num_chunks`.
    """

    num_chunks: int
    tile: int
    num_warps: int | None = dataclasses.field()  # no default
    num_stages: int | None = dataclasses.field()
    single_tile: bool = False
    adaptive_merge: bool = False

    def __post_init__(self):
        super().__post_init__()
        _power_of_two("num_chunks", self.num_chunks)
        _power_of_two("tile", self.tile)

    def check(self, num_blocks: int, topk: int) -> None:
        """Raise ValueError if the launch would leave out some of B `num_blocks`, or cannot hold K `topk` winners."""
        if self.tile < topk:
            raise ValueError(f"launch: tile must be at least topk = {topk}, got {self.tile}")
        if self.single_tile and self.num_chunks * self.tile < num_blocks:
            raise ValueError(
                f"launch: single_tile needs num_chunks * tile of at least {num_blocks} blocks, "
                f"got {self.num_chunks} * {self.tile}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreLaunch(_Launch):
    """Prefill score launch.

    Attributes:
      rows: query rows, times heads, of one program's tile.
      num_chunks: programs that share a tile's blocks.
      num_warps, num_stages: of the backend; None is its default.
    """

    rows: int
    num_chunks: int

    def __post_init__(self):
        super().__post_init__()
        _power_of_two("rows", self.rows)
        _positive("num_chunks", self.num_chunks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkLaunch(_Launch):
    """Prefill top-k launch: a program a row.

    Attributes:
      groups: how many groups a row's blocks are dealt to, best the lanes of a warp; never fewer than twice K.
      tile: blocks that one step over a row takes; never fewer than four a group.
      num_warps, num_stages: of the backend; None is its default.
    """

    groups: int
    tile: int

    def __post_init__(self):
        super().__post_init__()
        _power_of_two("groups", self.groups)
        _power_of_two("tile", self.tile)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLaunch:
    """How `minimax_m3_index_decode` runs on a GPU."""

    score: BalancedScore | SplitScore
    selection: Selection

    def __post_init__(self):
        if not isinstance(self.score, BalancedScore | SplitScore):
            raise TypeError(f"launch: score must be a BalancedScore or a SplitScore, got {self.score!r}")
        if not isinstance(self.selection, Selection):
            raise TypeError(f"launch: selection must be a Selection, got {self.selection!r}")


def decode_launch(
    *,
    arch: str,
    requests: int,
    heads: int,
    tokens: int,
    num_blocks: int,
    topk: int,
    head_dim: int,
    query_dtype: str,
    cache_dtype: str,
    max_decode_query_len: int,
) -> DecodeLaunch:
    """The launch of a decode call: R `requests`, H `heads`, T `tokens`, B `num_blocks`, K `topk`, D `head_dim`."""
    if not arch.startswith("gfx"):
        columns = ceil_power_of_two(heads) * ceil_power_of_two(max_decode_query_len)
        return DecodeLaunch(
            score=_nvidia_score(
                requests, columns, num_blocks,
                full=_is_full(query_dtype, cache_dtype), one_token=max_decode_query_len == 1,
            ),
            selection=_nvidia_selection(num_blocks, tokens * heads, topk),
        )  # fmt: skip
    tuned = arch == "gfx950" and head_dim == 128 and query_dtype == cache_dtype == "bfloat16"
    return DecodeLaunch(
        score=_decode_score(requests, heads, max_decode_query_len, tuned=tuned),
        selection=decode_selection(arch=arch, num_blocks=num_blocks, tokens=tokens, heads=heads, topk=topk),
    )


def _decode_score(requests: int, heads: int, max_decode_query_len: int, *, tuned: bool) -> BalancedScore | SplitScore:
    # One head and token is multiplied and added; more go through the matrix unit, which is 16 columns wide.
    columns = dict(min_columns=1 if heads == max_decode_query_len == 1 else AMD_MATRIX_COLUMNS)
    if tuned and 1 <= requests <= BALANCED_MAX_REQUESTS:
        few = requests <= BALANCED_FEW_REQUESTS
        budget = BALANCED_BUDGET_FEW if few else BALANCED_BUDGET_MORE
        return BalancedScore(budget=budget, num_warps=2, num_stages=1, **columns)
    first, last = HIGH_BATCH_REQUESTS
    high_batch = tuned and first <= requests <= last
    target = HIGH_BATCH_TARGET_GRID if high_batch else SPLIT_TARGET_GRID
    chunks = floor_power_of_two(min(max(target // max(1, requests), 1), MAX_SPLIT_CHUNKS))
    if heads > 1 and max_decode_query_len > 1:
        # Two stages of whole pages would take more than 64 KiB of LDS.
        return SplitScore(num_chunks=chunks, num_warps=4, num_stages=2, tile_tokens=64, **columns)
    if high_batch:
        return SplitScore(num_chunks=chunks, num_warps=2, num_stages=1, **columns)
    return SplitScore(num_chunks=chunks, **columns)


def _nvidia_score(requests: int, columns: int, num_blocks: int, *, full: bool, one_token: bool) -> SplitScore:
    if full:
        # No matrix unit multiplies float32 whole; half pages in one stage are what fits the registers.
        chunks = max(1, NVIDIA_RESIDENT // max(1, requests))
        return SplitScore(num_chunks=chunks, num_warps=4, num_stages=1, tile_tokens=64)
    if requests * num_blocks <= NVIDIA_ONE_BLOCK_PROGRAMS:
        # There is no second page to fetch meanwhile.
        return SplitScore(num_chunks=num_blocks, num_warps=4, num_stages=1, min_columns=NVIDIA_MIN_COLUMNS)
    resident = NVIDIA_RESIDENT if columns <= NVIDIA_MIN_COLUMNS else NVIDIA_RESIDENT_WIDE
    chunks = max(1, resident // max(1, requests))
    warps = 8 if one_token and requests * num_blocks <= NVIDIA_TWO_BLOCK_PROGRAMS else 4
    return SplitScore(num_chunks=chunks, num_warps=warps, num_stages=2, min_columns=NVIDIA_MIN_COLUMNS)


def _is_full(query_dtype: str, cache_dtype: str) -> bool:
    """Whether the product is of float32, as `rules.product_dtype` says: no matrix unit multiplies that whole."""
    wide = {query_dtype, cache_dtype} - {"float8_e4m3fn"}
    return "float32" in wide or len(wide) > 1


def _nvidia_selection(num_blocks: int, rows: int, topk: int) -> Selection:
    tile = min(ceil_power_of_two(max(num_blocks, topk, NVIDIA_MIN_TILE)), NVIDIA_MAX_TILE)
    if tile == NVIDIA_MIN_TILE:
        warps = 1
    elif tile <= 512 or (tile == 1024 and rows > 128):
        warps = 2
    else:
        warps = 4 if tile <= 4096 else 8
    chunks = ceil_power_of_two(ceil_div(num_blocks, tile))
    return Selection(num_chunks=chunks, tile=tile, num_warps=warps, num_stages=1, single_tile=True, adaptive_merge=True)


def prefill_score_launch(
    *, arch: str, heads: int, tokens: int, num_blocks: int, query_dtype: str, cache_dtype: str
) -> ScoreLaunch:
    """The launch of a prefill score call: H `heads` padded to a power of two, T `tokens`, B `num_blocks`."""
    full = _is_full(query_dtype, cache_dtype)
    rows = max(PREFILL_FULL_ROWS if full else PREFILL_ROWS, heads)
    programs = PREFILL_PROGRAMS_LONG if num_blocks >= PREFILL_LONG_BLOCKS else PREFILL_PROGRAMS
    chunks = min(max(ceil_div(programs, ceil_div(tokens * heads, rows)), 1), num_blocks)
    stages = 2 if arch.startswith("sm_") and not full else 1
    return ScoreLaunch(rows=rows, num_chunks=chunks, num_warps=8, num_stages=stages)


def prefill_topk_launch(*, arch: str, topk: int) -> TopkLaunch:
    """The launch of a prefill top-k call: K `topk`."""
    # Many rows fill the GPU: a row a warp needs no barrier, and each lane has a group. A large K asks for more groups
    # than the registers of one warp can rank.
    groups = PREFILL_TOPK_GROUPS_AMD if arch.startswith("gfx") else PREFILL_TOPK_GROUPS
    warps = 1 if topk_candidates(groups, topk) == 2 * groups else ceil_power_of_two(topk) // 8
    return TopkLaunch(groups=groups, tile=PREFILL_TOPK_TILE, num_warps=warps, num_stages=1)


def topk_candidates(groups: int, topk: int) -> int:
    """Candidates that a prefill top-k program ranks at most, two for each of its groups."""
    return 2 * max(groups, 2 * ceil_power_of_two(topk))


def decode_selection(*, arch: str, num_blocks: int, tokens: int, heads: int, topk: int) -> Selection:
    """The launch of decode's selection kernel."""
    if arch == "gfx950" and topk == 16 and 0 < num_blocks <= SELECTION_MAX_CHUNKS * SELECTION_TILE:
        fast = dict(single_tile=True, adaptive_merge=True)
        if num_blocks <= SHORT_SELECTION_TILE:
            return Selection(num_chunks=1, tile=SHORT_SELECTION_TILE, num_warps=2, num_stages=1, **fast)
        return Selection(num_chunks=SELECTION_MAX_CHUNKS, tile=SELECTION_TILE, num_warps=4, num_stages=2, **fast)
    chunks = min(max(SELECTION_TARGET_GRID // max(1, tokens * heads), 1), SELECTION_MAX_CHUNKS)
    return Selection(num_chunks=floor_power_of_two(chunks), tile=SELECTION_TILE, num_warps=8, num_stages=2)


def selection_chunks(num_blocks: int, launch: Selection) -> int:
    """Chunks of the launch that a row of `num_blocks` visible blocks uses."""
    return min(max(ceil_div(num_blocks, launch.tile), 1), launch.num_chunks)


def balanced_grid(budget: int, requests: int) -> int:
    """Programs of the balanced score launch: enough for every request's last, partly filled program."""
    return budget + requests - 1


def balanced_share(num_blocks: Sequence[int], budget: int) -> int:
    """Blocks one balanced program owns, given each request's visible blocks."""
    return max(1, ceil_div(sum(num_blocks), budget))


def balanced_ranges(num_blocks: Sequence[int], budget: int) -> Iterator[tuple[int, int, int]]:
    """What each balanced program owns, in program order: request, first block, end block.

    Programs past the last of these own nothing.
    """
    share = balanced_share(num_blocks, budget)
    for request, blocks in enumerate(num_blocks):
        for first in range(0, blocks, share):
            yield request, first, min(first + share, blocks)


def split_ranges(num_blocks: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """First and end block of each chunk of one request in the split score launch; trailing chunks may be empty."""
    size = ceil_div(num_blocks, num_chunks)
    for chunk in range(num_chunks):
        first = min(chunk * size, num_blocks)
        yield first, min(first + size, num_blocks)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")


def _power_of_two(name: str, value: int) -> None:
    _positive(name, value)
    if value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value!r}")


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def even_size(total: int, limit: int) -> int:
    """The least size, of at most `limit`, that covers `total` in as few pieces: they overlap by less than one each."""
    return ceil_div(total, ceil_div(total, limit))


def ceil_power_of_two(value: int) -> int:
    """The smallest power of two at least `value >= 1`."""
    return 1 << (value - 1).bit_length()


def floor_power_of_two(value: int) -> int:
    """The largest power of two at most `value >= 1`."""
    return 1 << (value.bit_length() - 1)
