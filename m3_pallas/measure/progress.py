"""A progress bar: tqdm's where it is installed, else a line that is written over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def bar(items: Iterable[T], label: str) -> Iterable[T]:
    """`items`, with their progress on stderr."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _plain(items, label)
    return tqdm(items, desc=label, leave=False)


def _plain(items: Iterable[T], label: str) -> Iterator[T]:
    total = len(items) if isinstance(items, Sized) else "?"
    for done, item in enumerate(items):
        print(f"\r{label}: {done}/{total}", end="", file=sys.stderr, flush=True)
        yield item
    print(f"\r{label}: {total}/{total}", file=sys.stderr)
