"""The trainer's side of a measurement: it takes rounds on request, and reports the seconds of each.

All systems are warm and wait while one of them is measured, so that repetitions alternate without a start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

CONTROL = "COMPARISON_CONTROL"  # the environment variable with the port of the program that measures
WARM_UP_ROUNDS = 10


def take_rounds(
    rank: int,
    one_round: Callable[[], object],
    check: Callable[[int], None],
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Warm up, then take as many rounds as each received line requests, until the connection is closed.

    `prepare` runs before each round and is not measured. `check` raises an error if the result of so many rounds is
    wrong.
    """
    with (
        socket.create_connection(("127.0.0.1", int(os.environ[CONTROL]))) as connection,
        connection.makefile("r") as lines,
        connection.makefile("w") as answers,
    ):
        num_rounds = len(_take(WARM_UP_ROUNDS, one_round, prepare))
        check(num_rounds)
        print(json.dumps({"rank": rank}), file=answers, flush=True)
        for line in lines:
            seconds = _take(int(line), one_round, prepare)
            num_rounds += len(seconds)
            check(num_rounds)
            print(json.dumps({"seconds": seconds}), file=answers, flush=True)


def _take(num_rounds: int, one_round: Callable[[], object], prepare: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(num_rounds):
        prepare()
        begin = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - begin)
    return seconds
