"""Compile the TPU kernels with the real TPU compiler, ahead of time: needs libtpu, no TPU. Prints a line a kernel.

Its own process: once libtpu is loaded, JAX looks for a TPU.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing here holds a TPU

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import m3_pallas

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
K, M = 1024, 2**20
# requests, heads, query_len, context, cache dtype; then head dim and K where they are not 128 and 16
DECODE = (
    (1, 1, 1, 128 * K, "bfloat16"),
    (64, 4, 1, 128 * K, "float32"),
    (64, 1, 4, M, "float8_e4m3fn"),
    (256, 4, 4, M, "bfloat16"),
    (1, 1, 1, 3 * M, "float32", 640, 64),
    (1, 1, 1, 3 * M, "bfloat16", 128, 16384),
)
# tokens, heads, context, cache dtype; two requests
PREFILL = (
    (2048, 4, 32 * K, "bfloat16"),
    (2048, 1, 128 * K, "float8_e4m3fn"),
    (8192, 1, M, "bfloat16"),
    (8192, 4, 128 * K, "float32"),
    (2048, 8, 128 * K, "bfloat16", 768, 64),
)
COMBINED = (16384, 4, M, "bfloat16")


def temporaries(call, *shapes, sharding):
    """HBM temporaries in bytes; raises if it does not compile."""
    arrays = [jax.ShapeDtypeStruct(dims, dtype, sharding=sharding) for dims, dtype in shapes]
    return jax.jit(call).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def queries(tokens, heads, dim, cache_dtype):
    return (tokens, heads, dim), "float32" if cache_dtype == "float32" else "bfloat16"


def decode(requests, heads, query_len, context, dtype, dim=128, topk=16, *, sharding):
    return temporaries(
        lambda *arrays: m3_pallas.minimax_m3_index_decode(
            *arrays, context, topk, 0, 1, heads, query_len, query_len, implementation="pallas_mosaic_tpu"
        ),
        queries(requests * query_len, heads, dim, dtype),
        ((1024, 128, dim), dtype),
        ((requests, context // 128), jnp.int32),
        ((requests,), jnp.int32),
        sharding=sharding,
    )


def prefill_arrays(tokens, heads, context, dtype, dim):
    table, requests = ((2, context // 128), jnp.int32), ((2,), jnp.int32)
    pages = (1024, 128, dim), dtype
    return queries(tokens, heads, dim, dtype), pages, table, ((3,), jnp.int32), requests, requests


def score(tokens, heads, context, dtype, dim=128, topk=16, *, sharding):
    return temporaries(
        lambda *arrays: m3_pallas.minimax_m3_index_score(
            *arrays, tokens, context, heads, implementation="pallas_mosaic_tpu"
        ),
        *prefill_arrays(tokens, heads, context, dtype, dim),
        sharding=sharding,
    )


def select(tokens, heads, context, dtype, dim=128, topk=16, *, sharding):
    return temporaries(
        lambda *arrays: m3_pallas.minimax_m3_index_topk(
            *arrays, tokens, topk, 0, 1, implementation="pallas_mosaic_tpu"
        ),
        ((heads, tokens, context // 128), jnp.float32),
        ((3,), jnp.int32),
        ((2,), jnp.int32),
        sharding=sharding,
    )


def combined(tokens, heads, context, dtype, dim=128, topk=16, *, sharding):
    return temporaries(
        lambda *arrays: m3_pallas.minimax_m3_index_prefill(
            *arrays, tokens, context, topk, 0, 1, heads, implementation="pallas_mosaic_tpu"
        ),
        *prefill_arrays(tokens, heads, context, dtype, dim),
        sharding=sharding,
    )


CALLS = (
    *((decode, case) for case in DECODE),
    *((call, case) for case in PREFILL for call in (score, select)),
    (combined, COMBINED),
)


def main() -> None:
    for chip in sys.argv[1:] or TOPOLOGIES:
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
        for call, case in CALLS:
            print(chip, call.__name__, *case, call(*case, sharding=SingleDeviceSharding(device)), flush=True)


if __name__ == "__main__":
    main()
