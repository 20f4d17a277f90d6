"""README's Python blocks run as they stand."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 2
