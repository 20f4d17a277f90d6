"""The example as its readers run it: it matches transformers, notices what does not, and is one with its notebook."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "decode_loop.py"
STEPS = 5


@pytest.fixture(autouse=True)
def package_of_the_checkout(monkeypatch):
    """The example finds the package where it is not installed."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent), prepend=os.pathsep)


def run(*args, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def short_file() -> dict[str, np.ndarray]:
    """The arrays of requests 2 and 3 only, with fewer answers."""
    kept = {}
    with np.load(EXAMPLES / "tiny_m3.npz") as file:
        for name in file:
            if name.startswith(("weights/", "request2/", "request3/")):
                answer_of_steps = name.endswith(("/tokens", "/logits")) or "/decode_blocks/" in name
                kept[name] = file[name][:STEPS] if answer_of_steps else file[name]
    return kept


def test_default_file(tmp_path):
    plot = tmp_path / "blocks.png"
    done = run("--plot", plot, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # 2389 prompt and 192 decoded tokens, of 2 sparse layers with 2 heads.
    assert "all 192 tokens and all 10324 rows of selected blocks" in done.stdout
    error = re.search(r"largest logit difference: (\S+)", done.stdout)
    assert error is not None
    assert float(error[1]) < 1e-4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [plot]


def test_changed_answers(tmp_path):
    """One entry of each kind of answer is changed: those are named, and no other."""
    changed = ["request2/tokens", "request2/prefill_blocks/layer1", "request3/logits", "request3/decode_blocks/layer2"]
    file = short_file()
    for name in changed:
        file[name].reshape(-1)[-1] += 1
    np.savez(tmp_path / "changed.npz", **file)
    done = run("changed.npz", cwd=tmp_path)
    assert done.returncode != 0
    assert "equal to transformers" not in done.stdout
    message = re.search(r"AssertionError: different from transformers: (.*)\n", done.stderr)
    assert message is not None, done.stderr
    assert sorted(message[1].split(", ")) == sorted(changed)


def test_notebook_is_the_script():
    jupytext = pytest.importorskip("jupytext")
    script, notebook = jupytext.read(SCRIPT), jupytext.read(SCRIPT.with_suffix(".ipynb"))
    assert [(c.cell_type, c.source) for c in script.cells] == [(c.cell_type, c.source) for c in notebook.cells]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"
