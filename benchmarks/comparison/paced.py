"""The trainer's side of a measurement: it takes rounds on request, and reports the seconds of each.

All systems are warm and wait while one of them is measured, so that repetitions alternate without a start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

from torch import Tensor

from .work import Work

CONTROL = "COMPARISON_CONTROL"  # the environment variable with the Unix socket of the program that measures


def take_rounds(
    work: Work,
    rank: int,
    one_round: Callable[[], object],
    read_values: Callable[[], list[Tensor]],
    *,
    prepare: Callable[[], object] = lambda: None,
    computes: bool = False,
) -> None:
    """Warm up, then take as many rounds as each received line requests, until the connection is closed.

    `prepare` runs before each round and is not measured. The work's computation is a sleep before each round, unless
    the round itself `computes`. Raises an error if the values are not those of the rounds taken.
    """
    compute_seconds = 0.0 if computes else work.compute_seconds
    num_done = 0

    def take(num_rounds: int) -> list[float]:
        nonlocal num_done
        seconds = []
        for _ in range(num_rounds):
            prepare()
            begin = time.perf_counter()
            if compute_seconds:
                time.sleep(compute_seconds)
            one_round()
            seconds.append(time.perf_counter() - begin)
        num_done += num_rounds
        work.check(read_values(), num_done)
        return seconds

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[CONTROL])
        with connection.makefile("r") as lines, connection.makefile("w") as answers:
            take(work.num_warm_up)
            print(json.dumps({"rank": rank}), file=answers, flush=True)
            for line in lines:
                print(json.dumps({"seconds": take(int(line))}), file=answers, flush=True)
