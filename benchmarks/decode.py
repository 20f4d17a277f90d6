"""The decode shapes of docs/performance.md: `python -m benchmarks.decode [--vllm PATH] [--json FILE]`."""

import sys

from m3_pallas.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--table", "--call", "decode", *sys.argv[1:]]))
