"""The prefill shapes of docs/performance.md: `python -m benchmarks.prefill [--vllm PATH] [--json FILE]`."""

import sys

from m3_pallas.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--table", "--call", "prefill", *sys.argv[1:]]))
