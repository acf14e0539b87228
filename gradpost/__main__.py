"""The command line as `python -m gradpost`, and as the program `gradpost`."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__" and not sys.flags.safe_path:
    # `-m` puts the current folder first, where a folder called `services` would shadow the package.
    sys.path[0] = str(Path(__file__).parents[1])


def main() -> None:
    """Run the command line. Ctrl-C ends it with code 130 and no traceback, also during the imports."""
    try:
        from .main import main as run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(130)


if __name__ == "__main__":
    main()
