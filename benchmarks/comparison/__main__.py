"""Gradpost beside its peers: the same rounds on the same machine, in one run, in turn.

    make bench [ARGS="--quick"]

All systems of a case are started and warmed up. Then each takes some rounds in turn, so that a change of the machine's
speed affects all of them. A repetition's figure is the median of its rounds; a ratio is one of two figures of the same
repetition. The table has medians over the repetitions and their 95 % bootstrap intervals.

MB on the wire are those that cross the loopback interface, so none of a Unix socket or of shared memory; MB a second
are counted in float32, whatever the wire type is. Peers with `_keeping` have malloc keep freed memory, as our services
do. The CPU-seconds of gloo include a copy of the gradients; its seconds do not.

The peers have all gradients in flat memory: gloo in one bucket, raw sockets in one array for each server, rpc in pieces
of 4 MB, since it takes up to twice as long with larger ones, and longer with many small tensors. Gradpost has a
gradient for each parameter, as a training script does.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from .cases import CASES, RAY, Case
from .contestant import Repetition
from .results import RESULTS, CaseResult, publish
from .systems import PEERS, start_ours


def measure(case: Case, peers: tuple[str, ...], repetitions: int) -> CaseResult:
    """Measure one case. An error of a system is raised with the end of its output."""
    with ExitStack() as stack:
        contestants = [stack.enter_context(start_ours(case.ours))]
        contestants += [stack.enter_context(PEERS[name](case.ours.work)) for name in peers]
        contestants += [stack.enter_context(start_ours(one, name)) for name, one in case.variants.items()]
        figures: dict[str, list[Repetition]] = {contestant.name: [] for contestant in contestants}
        for number in range(repetitions):
            for contestant in contestants:
                figures[contestant.name].append(contestant.take(case.num_rounds))
            medians = ", ".join(f"{name} {done[-1].seconds:.4f}" for name, done in figures.items())
            print(f"{case.name} {number + 1}/{repetitions}: seconds a round: {medians}", flush=True)
        peaks = {contestant.name: contestant.peak_bytes() for contestant in contestants}
        above = {contestant.name: contestant.server_bytes_above_idle() for contestant in contestants}
        works = {contestant.name: contestant.work for contestant in contestants}
    return CaseResult(case, works, figures, peaks, above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer peers, within five minutes")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), help="only these, where a case has them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report and latest.json")
    options = parser.parse_args()
    wanted = set(PEERS if options.peers is None else options.peers)
    if RAY in wanted and find_spec("ray") is None:
        print("ray is not installed and is left out; install it with pip install '.[bench]'", file=sys.stderr)
        wanted.discard(RAY)
    results: list[CaseResult] = []
    try:
        for case in CASES:
            peers = case.quick_peers if options.quick else case.peers
            if peers is not None and (not options.cases or case.name in options.cases):
                results.append(measure(case, tuple(name for name in peers if name in wanted), options.repetitions))
    finally:  # results of earlier cases are kept if one fails
        if results:
            publish(results, __doc__ or "", options.results, is_quick=options.quick)


if __name__ == "__main__":
    main()
