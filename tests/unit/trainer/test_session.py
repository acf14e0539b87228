"""A trainer's settings, what it may report, and how it leaves a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradpost import connect
from ps_config.certificates import CertificateError
from ps_config.environment import SettingsError
from ps_protocol.errors import RoundTimeout
from ps_protocol.fields import MAX_RESULT_NAME, MAX_RESULTS
from trainer_client.client.run_client import RunClient
from trainer_client.client.settings import read_settings
from trainer_client.client.telemetry import TrainerMetrics
from trainer_client.session.script import outcome_of
from trainer_client.session.session import Session

# ---------------------------------------------------------------- settings


def test_an_argument_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gradpost.toml"
    file.write_text('bucket_bytes = 1\nretry_seconds = 1\npush_type = "int8"\n')
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
    monkeypatch.setenv("GRADPOST_RETRY_SECONDS", "2")
    monkeypatch.setenv("GRADPOST_PUSH_TYPE", "topk")
    monkeypatch.setenv("RANK", "3")
    settings = read_settings(push_type="float16", rank=None)
    assert (settings.bucket_bytes, settings.retry_seconds, settings.push_type) == (1, 2.0, "float16")
    assert settings.rank == 3


# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go: of a pod, for torchrun
TRAIN_JOB = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "2"}

# https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
TASK = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None)),
        (TRAIN_JOB, (2, 4)),
        ({**TRAIN_JOB, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),  # torchrun in it, two processes to a pod
        ({"JOB_COMPLETION_INDEX": "3"}, (3, None)),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "6"}, (3, 6)),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, (2, None)),
        ({**TRAIN_JOB, "RANK": "", "WORLD_SIZE": ""}, (2, 4)),
        (TASK, (1, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, (None, None)),  # a batch script
        ({**TASK, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),  # torchrun in it
        ({**TASK, **TRAIN_JOB}, (2, 4)),
    ],
)
def test_rank_and_world_size_are_read_as_launchers_set_them(
    environ: dict[str, str], expected: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", *TRAIN_JOB, *TASK):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = read_settings()
    assert (settings.rank, settings.world_size) == expected
    settings = read_settings(rank=0, world_size=9)
    assert (settings.rank, settings.world_size) == (0, 9)


def test_wrong_arguments_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    with pytest.raises(TypeError, match=r"bucket_size is not a setting of a trainer; did you mean bucket_bytes\?"):
        read_settings(bucket_size=1)
    with pytest.raises(TypeError, match=r"frobnicate is not a setting of a trainer$"):
        read_settings(frobnicate=1)
    with pytest.raises(TypeError, match=r"mode is a setting of the coordinator; expect=\{'mode': …\} checks its value"):
        read_settings(mode="sync")
    with pytest.raises(TypeError, match="strategy is a setting of the coordinator"):
        read_settings(strategy="ring")
    with pytest.raises(TypeError, match=r"max_stale is not a setting of the mode; did you mean max_staleness\?"):
        read_settings(expect={"max_stale": 1})
    with pytest.raises(CertificateError, match=r"the TLS file .*ca\.pem cannot be read: No such file"):
        RunClient(read_settings(tls_ca=file))
    file.touch()
    with pytest.raises(ValueError, match="tls_client_ca needs tls_cert and tls_key"):
        read_settings(tls_client_ca=file)


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({"RANK": "one"}, {}, "RANK: input should be a valid integer, unable to parse string as an integer, not 'one'"),
        ({"PET_NNODES": "0"}, {}, "PET_NNODES: input should be greater than or equal to 1, not '0'"),
        ({"GRADPOST_COORDINATOR": "ftp://x:1"}, {}, "GRADPOST_COORDINATOR: expected a base URL such as "
         "http://10.0.0.5:7070, got 'ftp://x:1', not 'ftp://x:1'"),
        ({"GRADPOST_MAX_GRAD_NORM": "1", "GRADPOST_LOCAL_STEPS": "-1"}, {"max_grad_norm": "a"},
         "max_grad_norm: input should be a valid number, unable to parse string as a number, not 'a'; "
         "GRADPOST_LOCAL_STEPS: input should be greater than or equal to 0, not '-1'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_reported_with_the_name_of_its_source(
    environ: dict[str, str], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=rf"^{re.escape(message)}$"):
        connect(**arguments)


# ---------------------------------------------------------------- the session


@pytest.fixture
def session() -> Any:
    """A session without a client or a host."""
    session: Any = Session.__new__(Session)
    session.io, session.host, session._is_open, session._reported = SimpleNamespace(run=id), None, True, set()
    session.finish, session._pid = lambda: None, os.getpid()
    return session


def test_a_result_that_the_coordinator_would_refuse_is_refused_at_once(session: Any) -> None:
    """A refused heartbeat would end training."""
    results: dict[str, float] = {}
    session.client = SimpleNamespace(
        metrics=TrainerMetrics(), coordinator=SimpleNamespace(report_results=results.update)
    )
    for name in ("", "x" * (MAX_RESULT_NAME + 1), "loss\n", "\x1b[2A"):
        with pytest.raises(ValueError, match="the name of a result must have 1 to 200 printable characters"):
            session.report(**{name: 0.5})
    with pytest.raises(ValueError, match="rename 'gradpost/loss'"):
        session.report(**{"gradpost/loss": 0.5})
    session.report(**{f"val/{number}": 0.5 for number in range(MAX_RESULTS)})
    with pytest.raises(ValueError, match="at most 256 results"):
        session.report(loss=0.5)
    session.report(**{"val/0": 0.25})
    assert results == {"val/0": 0.25, **dict.fromkeys(session._reported - {"val/0"}, 0.5)}


@pytest.mark.parametrize(
    ("error", "code"), [(RoundTimeout("trainer 1 is late"), "round_timeout"), (SystemExit(3), None), (None, None)]
)
def test_a_trainer_leaves_with_the_code_of_its_error(
    error: BaseException | None, code: str | None, session: Any
) -> None:
    sent: list[tuple[Any, ...]] = []
    coordinator = SimpleNamespace(stop_heartbeats=lambda: None)
    session.client = SimpleNamespace(coordinator=coordinator, finish=lambda: None, leave=lambda *end: sent.append(end))
    session.close(*outcome_of(error))
    assert [end[2] for end in sent] == [code]
