"""The command line as `python -m gradpost`."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # `-m` puts the current folder first, where a folder called `services` would shadow the package.
    sys.path[0] = str(Path(__file__).parents[1])

from .main import main

if __name__ == "__main__":
    main()
