"""Record the golden runs: `python -m tests.golden.record [CLUSTER…]` replaces their digests.

Those in `digests.json` are of an AMD CPU, those in `digests_intel.json` of an Intel CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .clusters import differences, read_recorded, same_arithmetic, train, write_recorded
from .runs import SETUPS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("clusters", nargs="*", metavar="CLUSTER", help=f"one of {', '.join(SETUPS)}; none: all")
    names = parser.parse_args().clusters or list(SETUPS)
    if unknown := [name for name in names if name not in SETUPS]:
        parser.error(f"there is no cluster {unknown[0]!r}; there are {', '.join(SETUPS)}")
    recorded = read_recorded()
    with same_arithmetic():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found = train(name, Path(folder))
            for run, digests in found.items():
                for line in differences(f"{name}: {run}", digests, recorded.get(name, {}).get(run, {})):
                    print(line)
            recorded[name] = found
    write_recorded({name: recorded[name] for name in SETUPS if name in recorded})


if __name__ == "__main__":
    main()
