"""Compile the TPU kernels with the real TPU compiler, ahead of time: needs libtpu, no TPU. Prints a line a kernel.

Its own process: once libtpu is loaded, JAX looks for a TPU.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import m3_pallas

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
K, M = 1024, 2**20
# requests, heads, query_len, context, dtype
DECODE = ((1, 1, 1, 128 * K, "bfloat16"), (64, 4, 1, 128 * K, "float32"), (256, 4, 4, M, "bfloat16"))


def decode(requests, heads, query_len, context, dtype, sharding):
    """HBM temporaries in bytes; raises if it does not compile."""

    def shape(dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def call(*arrays):
        return m3_pallas.minimax_m3_index_decode(
            *arrays, context, 16, 0, 1, heads, query_len, query_len, implementation="pallas_mosaic_tpu"
        )

    arrays = (
        shape((requests * query_len, heads, 128), dtype),
        shape((1024, 128, 128), dtype),
        shape((requests, context // 128), jnp.int32),
        shape((requests,), jnp.int32),
    )
    return jax.jit(call).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    for chip in sys.argv[1:] or TOPOLOGIES:
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
        for case in DECODE:
            print(chip, *case, decode(*case, SingleDeviceSharding(device)), flush=True)


if __name__ == "__main__":
    main()
