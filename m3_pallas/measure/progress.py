"""A progress bar: tqdm's where it is installed, else a line that is written over."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

T = TypeVar("T")
CLEAR = "\r\033[K"  # the line on a terminal


def bar(items: Sequence[T], label: str) -> Iterator[T]:
    """`items`, with their progress on stderr."""
    if tqdm is not None:
        yield from tqdm(items, desc=label, leave=False)
        return
    for done, item in enumerate(items):
        print(f"{CLEAR}{label}: {done}/{len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    print(CLEAR, end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line above the bar."""
    if tqdm is not None:
        tqdm.write(text)
        sys.stdout.flush()
    else:
        print(CLEAR, end="", file=sys.stderr, flush=True)
        print(text, flush=True)
