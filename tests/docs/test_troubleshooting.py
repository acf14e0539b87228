"""`docs/troubleshooting.md`: symptoms of clusters are provoked, and the cluster prints the documented lines."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ps_protocol.errors import ERRORS
from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import Plot, Trainer
from .markdown import codes, examples, read, section, without_code
from .stage import Stage, needs_curl

TEXT = read("troubleshooting.md")
DOCUMENTED = {
    heading: [line for block in blocks for line in block.text.splitlines()]
    for heading in re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    if (blocks := examples(section(TEXT, heading), "text"))
}
[FIRST_LOOK] = examples(TEXT[: TEXT.index("\n## ")], "sh")
[GO_ON] = examples(section(TEXT, "It was paused"), "sh")


Symptom = Callable[[Stage], str]
SYMPTOMS: dict[str, Symptom] = {}


def symptom(heading: str) -> Callable[[Symptom], Symptom]:
    """Register a function that provokes the symptom of a heading, and returns the output."""

    def register(provoke: Symptom) -> Symptom:
        SYMPTOMS[heading] = provoke
        return provoke

    return register


def alike(text: str) -> str:
    """Return the text without numbers, names of runs and line wrapping, which differ from run to run."""
    text = text.replace('\\"', '"').replace("\\\\", "\\")
    text = re.sub(r"\b(?=\w*\d)[0-9a-f]{12}\b", "RUN", text)
    return re.sub(r"\d+(\.\d+)?", "0", " ".join(text.split()))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    with stage.cluster:
        stage.clear()
        yield stage


def test_every_code_is_listed() -> None:
    assert set(ERRORS) <= set(codes(without_code(TEXT)))


@pytest.mark.cluster
@pytest.mark.extended
@needs_curl
def test_the_first_look(stage: Stage) -> None:
    try:
        stage.begin_run()
        assert "is training" in stage.shell(FIRST_LOOK.text)
    finally:
        stage.clear()


# ---------------------------------------------------------------- the run does not begin


def gather(stage: Stage) -> None:
    """Begin a run that waits for trainer 1."""
    stage.play(Plot())
    stage.wait_for(lambda: [trainer.state for trainer in stage.cluster.status().trainers] == ["declared"])


@symptom("It waits for a process")
def _(stage: Stage) -> str:
    gather(stage)
    return stage.run("status") + stage.run("checkpoint", "create")


@symptom("The coordinator does not answer")
def _(stage: Stage) -> str:
    unused = "http://127.0.0.1:9"
    return stage.run("status", GRADPOST_COORDINATOR=unused) + stage.train(0, unused, retry_seconds=1)


@symptom("The rank is taken")
def _(stage: Stage) -> str:
    gather(stage)
    return stage.train(0, retry_seconds=1)


@symptom("Trainers and cluster do not agree")
def _(stage: Stage) -> str:
    gather(stage)
    tries = [stage.train(5), stage.train(1, world_size=3), stage.train(1, mode="async"), stage.train(1, size=3)]
    return "\n".join(tries)


@symptom("413: too large")
def _(stage: Stage) -> str:
    with ThreadPoolExecutor() as both:
        return "\n".join(both.map(lambda rank: stage.train(rank, size=250_000), (0, 1)))


# ---------------------------------------------------------------- the run stands still


def describe_end(trainer: Trainer) -> str:
    end = trainer.wait_for_end()
    return f"{end.what}: {end.text}"


@symptom("It hangs at a barrier")
def _(stage: Stage) -> str:
    survivor, hanging = stage.play(Plot(), Plot(hangs_after=3))
    hanging.wait_for("hanging")
    status = stage.status_with("trainer 1 (")
    return f"{status}\n{describe_end(survivor)}"


@symptom("It was paused")
def _(stage: Stage) -> str:
    stage.begin_run()
    stage.ask("POST", "/v1/controls/pause")
    status = stage.status_with("paused")
    stage.shell(GO_ON.text)
    stage.wait_for(lambda: "paused" not in stage.cluster.status().model_dump_json())
    return status


@symptom("A trainer was lost")
def _(stage: Stage) -> str:
    survivor, victim = stage.play(Plot(), Plot())
    victim.wait_for("round", 1)
    victim.signal(signal.SIGKILL)
    status = stage.status_with("was lost")
    return f"{status}\n{describe_end(survivor)}"


@symptom("A pserver is silent")
def _(stage: Stage) -> str:
    trainers = stage.begin_run()
    stage.cluster.pservers[0].signal(signal.SIGKILL)
    try:
        status = stage.status_with("is silent")
        return status + "\n".join(map(describe_end, trainers))
    finally:
        stage.cluster.start_pserver(0)


@symptom("The disk is full")
def _(stage: Stage) -> str:
    with LocalCluster(pservers=1, trainers=1, failpoints="log.append.before=enospc@3") as cluster:
        trainer = Trainer(cluster.address, 0, Plot(5))
        assert trainer.wait_for_end().what == "done"
        trainer.end()
    return "\n".join(cluster.output)


# ---------------------------------------------------------------- errors and refusals


@symptom("NaN or infinity")
def _(stage: Stage) -> str:
    [survivor] = stage.play(Plot())
    blamed = stage.train(1, nan_at=4)
    return f"{blamed}\n{describe_end(survivor)}"


@symptom("409: stale")
def _(stage: Stage) -> str:
    survivor, evicted = stage.play(Plot(), Plot(hangs_after=1))
    evicted.wait_for("hanging")
    stage.ask("POST", "/v1/trainers/1/evict")
    survivor.wait_for("round", 100)  # the coordinator has had a heartbeat of the other one
    evicted.wake()
    stale = describe_end(evicted)
    stage.cluster.coordinator.signal(signal.SIGKILL)
    stage.cluster.coordinator.wait()
    (stage.folder / "state" / "coordinator.json").unlink()
    stage.cluster.restart_coordinator()
    return f"{stale}\n{describe_end(survivor)}"


# ---------------------------------------------------------------- checkpoints


@symptom("A checkpoint is refused")
def _(stage: Stage) -> str:
    train_until_checkpoint(stage)
    (stage.folder / "empty").mkdir()
    nowhere = str(stage.folder / "empty")
    return stage.run("checkpoint", "restore", "--round", "12345") + stage.run(
        "checkpoint", "export", "model.safetensors", "--checkpoints", nowhere
    )


def train_until_checkpoint(stage: Stage) -> None:
    """Begin a run, and wait for its checkpoint 0."""
    stage.begin_run()
    stage.wait_for(lambda: [one["round"] for one in json.loads(stage.ask("GET", "/v1/checkpoints"))] == [0])


@symptom("The loss jumps back")
def _(stage: Stage) -> str:
    train_until_checkpoint(stage)
    return stage.run("checkpoint", "restore", "--round", "0") + stage.run("events")


@pytest.mark.cluster
@pytest.mark.extended
@needs_curl
@pytest.mark.parametrize("heading", [*SYMPTOMS])
def test_a_symptom_has_the_documented_output(heading: str, stage: Stage) -> None:
    try:
        output = SYMPTOMS[heading](stage)
    finally:
        stage.clear()
    for line in DOCUMENTED[heading]:
        assert alike(line) in alike(output), f"nothing printed {line!r}; the output is\n{output}"
