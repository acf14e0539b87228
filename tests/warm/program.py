"""Run `python program.py gradpost up …` in a process whose children are forked by a warm server.

The program starts no faster, but its children do not repeat slow imports.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.warm import server
    from tests.warm.processes import WarmServers
    from trainer_client.testing import processes

    server.import_slow_modules()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        processes.start_process = WarmServers(ours).start
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        ours.close()
        os.setsid()
        server.become(*server.await_order(theirs))
