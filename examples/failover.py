"""A pserver is killed during training. Its standby replaces it, and the parameters end with the same bits.

    python examples/failover.py

This trains a model twice on a cluster of its own: gradpost up --standbys 1 -- python examples/failover.py --train
In the second run a pserver gets SIGKILL as soon as its standby is in sync.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import httpx
import psutil
import torch
from torch import nn

import gradpost

ROUNDS = 300
NUM_TIMES = 80  # rounds since one second before the death of the pserver, until the report about it


def train() -> None:
    """Train as one trainer, and print each round and a digest of the final parameters."""
    torch.set_num_threads(1)  # several trainers share this machine
    session = gradpost.connect()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = gradpost.RemoteOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)
    while optimizer.round < ROUNDS:
        torch.manual_seed(1000 * optimizer.round + session.rank)  # so that a batch depends on round and rank alone
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin()).backward()
        optimizer.step()
        print(f"rank {session.rank} round {optimizer.round} at {time.time()}", flush=True)
        time.sleep(0.02)  # as if the model were larger
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"digest {digest.hexdigest()}", flush=True)


def ask(address: str) -> Any:
    """Return the status of the cluster."""
    return httpx.get(f"{address}/v1/status").raise_for_status().json()


def kill_pserver(up: int) -> None:
    """Kill pserver 0, which is a child of `gradpost up`."""
    children = psutil.Process(up).children(recursive=True)
    next(child for child in children if child.environ().get("GRADPOST_PSERVER_INDEX") == "0").kill()


def run_cluster(folder: str, *, kills: bool) -> str:
    """Train on a cluster, and return the digest of the parameters. If it fails, this process exits with its output."""
    options = ["--pservers", "2", "--trainers", "2", "--standbys", "1", "--port", "0", "--state-dir", folder]
    command = [sys.executable, "-m", "gradpost", "up", *options, "--", sys.executable, __file__, "--train"]
    text, address, killed_at = "", "", 0.0
    times: list[float] = []  # of the rounds of rank 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        assert up.stdout is not None
        for line in up.stdout:
            text += line
            if found := re.search(r"dashboard: (\S+)", line):
                address = found[1]
            if not (found := re.search(r"rank 0 round (\d+) at (\S+)", line)):
                continue
            times.append(float(found[2]))
            if not kills:
                continue
            if not killed_at:
                standbys = ask(address)["standbys"]
                if any(standby["follows"] == 0 and standby["role"] == "in_sync" for standby in standbys):
                    print(f"round {found[1]}: the standby of pserver 0 is in sync; pserver 0 gets SIGKILL", flush=True)
                    killed_at = time.time()
                    kill_pserver(up.pid)
            elif len(since := [at for at in times if at > killed_at - 1]) >= NUM_TIMES:
                pause = max(later - earlier for earlier, later in pairwise(since))
                leader = ask(address)["pservers"][0]
                incarnation = leader["heartbeat"]["incarnation"]
                print(f"round {found[1]}: training goes on after a pause of {pause:.2f} s")
                print(f"pserver 0 is its former standby, {leader['address']}, with incarnation {incarnation}")
                kills = False
    if up.returncode != 0 or kills:
        sys.exit(f"the training has failed, or ended before the fail-over:\n{text}")
    [digest] = set(re.findall(r"digest (\w+)", text))  # the trainers have the same
    print(f"SHA-256 of the parameters after {ROUNDS} rounds: {digest}", flush=True)
    return digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="be one trainer of a cluster")
    if parser.parse_args().train:
        train()
        return
    with tempfile.TemporaryDirectory() as folder:
        print("undisturbed:", flush=True)
        expected = run_cluster(folder, kills=False)
        print("with a pserver that dies:", flush=True)
        if run_cluster(folder, kills=True) != expected:
            sys.exit("the parameters differ")
    print("the same bits")


if __name__ == "__main__":
    main()
