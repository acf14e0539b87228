"""The trade-off between consistency and speed: run each cell without a result, then write the report.

    python benchmarks/consistency/study.py [--only TEXT]

Takes most of an hour on two cores. An interrupted study can be resumed: each run writes a file below
benchmarks/results/consistency, and is not repeated if it exists. The seeds of a cell run at the same time, each with
its own cluster. This disturbs them little, as trainers mostly wait for an emulated device.
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

os.environ["OMP_NUM_THREADS"] = "1"  # for all processes; two cores are easily overloaded

from cells import PSERVERS, SEEDS, TRAINERS, Cell, all_cells
from results import RESULTS, result_file, write_result
from trainer import train

from trainer_client.testing import LocalCluster

TIMEOUT_SECONDS = 600


def run_cell(cell: Cell, seed: int, processes: ProcessPoolExecutor) -> dict[str, Any]:
    """Train once, and return the trainers' records and the summary of the servers."""
    with LocalCluster(pservers=PSERVERS, trainers=TRAINERS, **cell.cluster) as cluster:
        started = [processes.submit(train, cell, seed, cluster.address, rank) for rank in range(TRAINERS)]
        trainers = [future.result(timeout=TIMEOUT_SECONDS) for future in started]
        summary = json.loads(cluster.summary().model_dump_json())
    return {"cell": asdict(cell), "seed": seed, "summary": summary, "trainers": trainers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cells whose name contains this; no report")
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
