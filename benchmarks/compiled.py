"""What the kernels compile to for GPUs that are not here, as a table in Markdown. Needs the triton wheel, no GPU.

python -m benchmarks.compiled
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.test_decode_compiled import compile_decode

K = 1024


def main() -> None:
    print("| architecture | R | H | query_len | kernel | warps/stages | registers | LDS bytes | occupancy | spills |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for arch in ("gfx942", "gfx950", "sm_90"):
        for requests, heads, query_len in ((1, 1, 1), (32, 1, 1), (32, 2, 1), (32, 4, 1), (32, 4, 4), (100, 4, 1)):
            for r in compile_decode(arch, requests, heads, query_len, 128 * K):
                print(
                    f"| {arch} | {requests} | {heads} | {query_len} | {r.kernel.removeprefix('m3_decode_')} "
                    f"| {r.warps}/{r.stages} | {r.registers} | {r.shared_bytes} | {r.occupancy} | {r.spills} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
