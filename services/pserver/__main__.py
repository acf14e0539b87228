"""`python -P -m services.pserver`: one pserver process, configured by `GRADPOST_*`."""

import sys

from services.runtime.process import import_process

if __name__ == "__main__":
    process = import_process("pserver")
    sys.exit(process.main(process.PserverSettings()))
