"""Gradpost beside its peers: the same rounds on the same machine, in one run, in turn.

    make bench [ARGS="--quick"]
    python -m benchmarks.comparison --links 1gbit --trainers 4 --pservers 4

With `--links`, each process has a network namespace with a link of this rate; this needs Linux, root, `ip` and `tc`.
The case embeddings_growth is also drawn if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from ..report import exit_on_signals
from .cases import CASES, RAY, Case
from .contestant import Repetition
from .machines import Loopback, Machine, connected_machines, measure_bits_per_second, parse_rate
from .results import RESULTS, CaseResult, publish
from .systems import OURS, PEERS, start_ours

TEXT = """\
All systems of a case are started and warmed up. Then each takes some rounds in turn, so that a change of the machine's
speed affects all of them. A repetition's figure is the median of its rounds; a ratio is one of two figures of the same
repetition. The table has medians over the repetitions and their 95 % bootstrap intervals.

MB on the wire are those that all network interfaces send, so none of a Unix socket or of shared memory; MB a second are
counted in float32, whatever the wire type is. The CPU-seconds of servers include the coordinator's. Peers with
`_keeping` have malloc keep freed memory, as our services do. The CPU-seconds of gloo include a copy of the gradients;
its seconds do not.

The peers have all gradients in flat memory: gloo in one bucket, raw sockets in one array for each server, rpc in pieces
of 4 MB, since it takes up to twice as long with larger ones, and longer with many small tensors. Gradpost and
`gloo_ddp` have a gradient for each parameter, as a training script does.

Models with embeddings take real steps with the same precomputed ids in all systems. "MB of rows and ids" is what a
pserver has to carry in float32: each trainer pushes the rows of its batch, and pulls those of all batches, with 4 bytes
for each id. DDP gathers the rows of each trainer at all others instead, which are fewer bytes with two trainers. CPU
figures a GB, and ratios of cases with other numbers of rows, are for these bytes. Checkpoints are as often as by
default: none with durability `none`; with `log` when a log has four times the size of its shard."""
LINKS_TEXT = """

Each server and trainer has a machine of its own, the coordinator that of the first server: network namespaces on one
bridge, every link held to {megabits:g} Mbit/s in both directions by a token bucket (tc-tbf) on both of its ends. A
plain transfer over TCP reaches {plain:.0f} Mbit/s. All {num_machines} machines share the {cores} cores of the real one,
so **the processors may be the limit instead of the links**: "busy cores" counts all work of the real machine, also that
of the kernel for the links, which the CPU-seconds of the processes do not contain. Computation is a sleep, of the same
length in each matrix; the systems without overlap sleep before they exchange. The interval of three repetitions is
their range."""


def measure(case: Case, peers: tuple[str, ...], machines: list[Machine], repetitions: int) -> CaseResult:
    """Measure one case. An error of a system is raised with the end of its output."""
    with ExitStack() as stack:
        contestants = [stack.enter_context(start_ours(OURS, case.ours, machines))]
        contestants += [stack.enter_context(PEERS[name](name, case.ours.work, machines)) for name in peers]
        contestants += [stack.enter_context(start_ours(name, one, machines)) for name, one in case.variants.items()]
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
    parser.add_argument("--trainers", type=int, help="instead of each case's own number")
    parser.add_argument("--pservers", type=int, help="instead of each case's own number; servers of the peers, too")
    parser.add_argument(
        "--links", type=parse_rate, metavar="1gbit", help="a machine for each process; not for shared memory"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the report and latest.json")
    options = parser.parse_args()
    exit_on_signals()
    wanted = set(PEERS if options.peers is None else options.peers)
    if RAY in wanted and find_spec("ray") is None:
        print("ray is not installed and is left out; install it with pip install '.[bench]'", file=sys.stderr)
        wanted.discard(RAY)
    numbers = {"num_trainers": options.trainers, "num_servers": options.pservers}
    numbers = {name: number for name, number in numbers.items() if number is not None}
    chosen = [case.resize(**numbers) for case in CASES if _is_chosen(case, options)]
    if not chosen:
        parser.error("there is no such case: --quick has none over links, and leaves out some others")
    num_machines = max(case.count_machines() for case in chosen)
    machines: list[Machine] = [Loopback()] * num_machines
    text, kind, where = TEXT, "_quick" if options.quick else "", "on loopback"
    results: list[CaseResult] = []
    with ExitStack() as stack:
        if options.links:
            try:
                machines = [*stack.enter_context(connected_machines(num_machines, options.links))]
            except OSError as error:
                parser.exit(2, f"{parser.prog}: there are no links here: {error}\n")
            plain = measure_bits_per_second(machines[-1], machines[0], options.links) / 1e6
            text += LINKS_TEXT.format(
                megabits=options.links / 1e6, plain=plain, num_machines=num_machines, cores=os.cpu_count()
            )
            kind, where = "_links", "in network namespaces"
        try:
            for case in chosen:
                peers = (case.quick_peers if options.quick else case.peers) or ()
                names = tuple(name for name in peers if name in wanted)
                results.append(measure(case, names, machines, options.repetitions))
        finally:  # results of earlier cases are kept if one fails
            if results:
                publish(results, text, options.results, kind, where)


def _is_chosen(case: Case, options: argparse.Namespace) -> bool:
    """Return whether a case runs: by default those with computation run over links, the others over loopback."""
    if options.quick and case.quick_peers is None:
        return False
    if options.cases:
        return case.name in options.cases
    return bool(options.links) == bool(case.ours.work.compute_seconds)


if __name__ == "__main__":
    main()
