"""`python -m swaralign.scoring serve|check`: the commands of `swaralign scorer`, without what the others need."""

from __future__ import annotations

import argparse
import sys

from swaralign.scoring.commands import add_commands


def main() -> int:
    """Run one command; returns the exit status, 1 after a fault, which is told on stderr."""
    parser = argparse.ArgumentParser(prog="python -m swaralign.scoring", description=__doc__)
    add_commands(parser)
    arguments = parser.parse_args()
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(f"swaralign: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
