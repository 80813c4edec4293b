"""Runs chaos: ``python -m tests.chaos --seed 1 --minutes 20``. One line of JSON; 1 if it broke."""

import argparse
import asyncio
import sys

from tests.chaos.acts import Run
from tests.chaos.ledger import Ledger


def main() -> None:
    """Run, print the line, and end with 1 on any violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--stop-at-first", action="store_true", help="end at the first violation")
    parser.add_argument("--first-act", type=int, default=0, help="begin there, to see one again")
    asked = parser.parse_args()
    ledger = Ledger(asked.seed, stops_at_first=asked.stop_at_first)
    run = Run(asked.seed, asked.minutes, ledger, first_act=asked.first_act)
    asyncio.run(run.run())
    print(ledger.line(minutes=asked.minutes, settings=run.settings), flush=True)
    sys.exit(bool(ledger.violations))


if __name__ == "__main__":
    main()
