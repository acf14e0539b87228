"""`python -P -m services.coordinator`: the coordinator process, configured by `GRADPOST_*`."""

import sys

from services.runtime.process import import_process

if __name__ == "__main__":
    process = import_process("coordinator")
    sys.exit(process.main(process.CoordinatorSettings()))
