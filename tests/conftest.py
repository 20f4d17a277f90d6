"""Test configuration: CPU unless JAX_PLATFORMS says otherwise, strict promotion, and the implementations under test."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("suite")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 2)  # for shard_map

IMPLEMENTATIONS = {
    "default": dict(),
    "xla": dict(implementation="xla"),
    "triton_interpreted": dict(implementation="pallas_triton", interpret=True),
}


# On a CPU None takes "xla"; that it does is what the golden tests, run with all three, show.
DISTINCT = {
    name: options
    for name, options in IMPLEMENTATIONS.items()
    if name != "default" or os.environ["JAX_PLATFORMS"] != "cpu"
}


@pytest.fixture(params=DISTINCT)
def options(request) -> dict:
    """Keyword options of the public calls that choose an implementation."""
    return DISTINCT[request.param]


@pytest.fixture
def no_races(capfd):
    """Fails where the TPU interpreter of a JAX that cannot raise reports a race."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
