"""What the two commands leave: exit statuses, records as JSON files, errors in a line."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

DIFFERENT, CANNOT_START, INTERRUPTED = 1, 2, 130  # exit statuses other than 0


def check_file(file: pathlib.Path | None) -> None:
    """Can `file`, if there is one, be written? It may exist, as a regular file.

    Raises:
      OSError: if not, with the reason.
    """
    if file is None:
        return
    target = file.resolve()
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write {file}: it is not a regular file")
    if not target.parent.is_dir():
        raise OSError(f"cannot write {file}: its folder does not exist")
    if not os.access(target.parent, os.W_OK):
        raise OSError(f"cannot write {file}: its folder is not writable")


def write_json(file: pathlib.Path, record: dict[str, Any]) -> None:
    """Replace the regular file `file`, or what it links to, as a whole: it is never half written."""
    target = file.resolve()
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, target)


def error_line(error: Exception) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
