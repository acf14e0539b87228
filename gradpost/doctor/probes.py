"""Checks in processes of their own: they take seconds, and what they try might crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from .finding import Finding

TIMEOUT_SECONDS = 60.0  # a busy machine takes long to import torch

_running: dict[str, subprocess.Popen[str]] = {}


def start_all() -> None:
    """Start both probes, so that they run beside the other checks and each other."""
    for name in ("torch", "http2"):
        _running[name] = subprocess.Popen(
            [sys.executable, "-m", f"gradpost.doctor.probe_{name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",  # `-m` looks there first, for the packages of nobody
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


def check_torch() -> Finding:
    """Whether torch can be imported, and how many threads it would take."""
    answer = _finish("torch")
    if "error" in answer:
        advice = "install torch as https://pytorch.org/get-started says for this machine"
        return Finding("torch", "broken", answer["error"], advice)
    detail = f"{answer['version']}, {answer['threads']} threads, {answer['device']}, imported in {answer['seconds']} s"
    if answer["threads"] > 1 and not os.environ.get("OMP_NUM_THREADS"):
        advice = "several trainers on one machine: set OMP_NUM_THREADS (gradpost up does), or torch.set_num_threads(1)"
        return Finding("torch", "ok", detail, advice)
    return Finding("torch", "ok", detail)


def check_http2() -> Finding:
    """Whether tensors can travel over HTTP/2 between our server and our client."""
    answer = _finish("http2")
    if "error" in answer:
        return Finding("http/2", "broken", answer["error"], "set GRADPOST_HTTP2=false to use HTTP/1.1")
    detail = f"{answer['version']}, {answer['megabytes']} MB at {answer['megabytes_per_second']} MB/s"
    return Finding("http/2", "ok" if answer["version"] == "HTTP/2" else "broken", detail)


def _finish(name: str) -> dict[str, Any]:
    """The probe's answer; `error` if it gave none."""
    process = _running.pop(name)
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer within {TIMEOUT_SECONDS:g} s"}
    if process.returncode < 0:
        return {"error": f"the probe was ended by {signal.Signals(-process.returncode).name}"}
    if process.returncode > 0:
        return {"error": (errors.strip().splitlines() or ["the probe failed"])[-1]}
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
