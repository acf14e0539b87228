"""`python -m tests.chaos`: a campaign of random faults against real clusters; see docs/reliability.md."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .campaign import Campaign
from .faults import FAULTS
from .sabotaged import SABOTAGES


def main() -> int:
    """Run a campaign, and return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="start no history after this time (default: 3)")
    parser.add_argument("--count", type=int, help="number of histories, instead of --minutes")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; the next have the next seeds")
    parser.add_argument("--standbys", type=int, choices=(0, 1), help="of each pserver (default: random)")
    parser.add_argument("--only", action="append", metavar="KIND", choices=sorted(FAULTS), help="faults of this kind")
    parser.add_argument("--each", action="store_true", help="a small history for each kind, with one fault")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="break the services, which has to be detected")
    parser.add_argument("--folder", type=Path, help="folder for histories (default: that of temporary files)")
    arguments = parser.parse_args()
    kinds = SABOTAGES[arguments.sabotage][1] if arguments.sabotage else tuple(FAULTS)
    campaign = Campaign(
        arguments.seed,
        kinds=arguments.only or kinds,
        sabotage=arguments.sabotage,
        num_standbys=arguments.standbys,
        folder=arguments.folder,
    )
    try:
        if arguments.each:
            campaign.run_each()
        elif arguments.count is not None:
            campaign.run(count=arguments.count)
        else:
            campaign.run(until=time.monotonic() + 60 * arguments.minutes)
    except KeyboardInterrupt:
        print("interrupted")
    campaign.report()
    return 1 if campaign.num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
