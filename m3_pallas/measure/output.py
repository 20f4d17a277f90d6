"""Records as JSON files, never half written and known to be writable before anything is measured; errors in a line."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def check_folder(file: pathlib.Path | None) -> None:
    """Raises FileNotFoundError if `file` is given and its folder does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {file}: its folder does not exist")


def write_json(file: pathlib.Path, record: dict[str, Any]) -> None:
    """Replace `file` as a whole."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, file)


def describe(error: Exception) -> str:
    """Type and first line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
