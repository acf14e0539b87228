"""How consistency and speed trade off: runs every cell of the grid that has no result yet, then writes the report.

    python benchmarks/consistency/study.py [--only TEXT]

Takes most of an hour on two cores. Resumable: each run leaves a file below benchmarks/results/consistency, and one that
has a file is not repeated. The seeds of a cell run side by side, each with a cluster of its own: trainers mostly wait
for the device that is emulated, so that this costs them little, and it saves two thirds of the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # for all that is started here; two cores thrash easily

from cells import PSERVERS, SEEDS, TRAINERS, Cell, all_cells
from results import RESULTS, result_file, write_result
from trainer import train

from trainer_client.testing import LocalCluster

TIMEOUT_SECONDS = 600


def run_cell(cell: Cell, seed: int, processes: ProcessPoolExecutor) -> dict[str, Any]:
    """Train once; everything that the trainers wrote down, and the summary of the servers."""
    with LocalCluster(pservers=PSERVERS, trainers=TRAINERS, **cell.cluster) as cluster:
        started = [processes.submit(train, cell, seed, cluster.address, rank) for rank in range(TRAINERS)]
        trainers = [future.result(timeout=TIMEOUT_SECONDS) for future in started]
        summary = json.loads(cluster.summary().model_dump_json())
    return {"cell": asdict(cell), "seed": seed, "summary": summary, "trainers": trainers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cells whose name holds this; no report")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in all_cells() if options.only in cell.name]
    begin = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer"])  # twelve processes, and torch is imported once
    with (
        ProcessPoolExecutor(len(SEEDS) * TRAINERS, context) as processes,
        ThreadPoolExecutor(len(SEEDS)) as seeds,
    ):
        for number, cell in enumerate(cells, start=1):
            todo = [seed for seed in SEEDS if not result_file(cell.name, seed).exists()]
            runs = [(seed, seeds.submit(run_cell, cell, seed, processes)) for seed in todo]
            for seed, run in runs:
                write_result(cell.name, seed, run.result())
            if todo:
                minutes = (time.monotonic() - begin) / 60
                print(f"{number:2} of {len(cells)}  {cell.name:32} {minutes:5.1f} minutes", flush=True)
    if not options.only:
        from report import write_report

        write_report()


if __name__ == "__main__":
    main()
