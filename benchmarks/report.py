"""A record of `bench` as tables in Markdown: `python -m benchmarks.report FILE.json [--plot FILE.png]`."""

import argparse
import json
import pathlib

from m3_pallas.measure import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    print(report.markdown(record))
    if options.plot:
        report.plot(record, options.plot)


if __name__ == "__main__":
    main()
