"""`python -m m3_pallas check` and `python -m m3_pallas bench`: is it right here, and how fast is it?"""

import argparse
import sys

from m3_pallas.measure import bench, check


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if all is well, 1 if answers differ or fail, 2 if it cannot start, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m m3_pallas", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="check | bench")
    for module, text in ((check, "compare with the oracle on this device"), (bench, "time it on this device")):
        command = commands.add_parser(module.__name__.rsplit(".", 1)[1], help=text, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
