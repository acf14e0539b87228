"""A session: its settings, what it may report, its metrics and log, and the tracebacks of its errors."""

from __future__ import annotations

import io
import pickle
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

import gradpost
from gradpost import BadInput, GradpostError, NonFiniteGradient, RunStopped, TrainerLost, Unreachable, connect
from ps_config.certificates import CertificateError, TlsFiles, client_context
from ps_config.environment import SettingsError
from ps_protocol.fields import MAX_RESULT_NAME, MAX_RESULTS
from trainer_client.client.coordinator_client import make_log
from trainer_client.client.run_client import RunClient
from trainer_client.client.settings import read_settings
from trainer_client.client.telemetry import MetricsServer
from trainer_client.session.script import hide_frames

from ..protocol.test_access import Authority

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


def test_a_result_that_the_coordinator_would_refuse_is_refused_at_once() -> None:
    """A refused heartbeat would end training."""
    with connect(strategy="local") as session:
        for name in ("", "x" * (MAX_RESULT_NAME + 1), "loss\n", "\x1b[2A"):
            with pytest.raises(ValueError, match="the name of a result must have 1 to 200 printable characters"):
                session.report(**{name: 0.5})
        with pytest.raises(ValueError, match="rename 'gradpost/loss'"):
            session.report(**{"gradpost/loss": 0.5})
        session.report(**{f"val/{number}": 0.5 for number in range(MAX_RESULTS)})
        with pytest.raises(ValueError, match="at most 256 results"):
            session.report(loss=0.5)
        session.report(**{"val/0": 0.25})


# ---------------------------------------------------------------------- tracebacks


Shown = list[tuple[type[BaseException], BaseException, TracebackType | None]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The calls of the hook that the script has set."""
    calls: Shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *call: calls.append(call))
    return calls


@pytest.fixture
def optimizer() -> Iterator[gradpost.RemoteOptimizer]:
    """An optimizer whose next step raises NonFiniteGradient."""
    parameter = torch.nn.Parameter(torch.ones(2))
    with gradpost.connect(strategy="local", nonfinite="reject"):
        optimizer = gradpost.RemoteOptimizer(torch.optim.SGD([("w", parameter)], lr=0.1))
        parameter.grad = torch.full((2,), torch.nan)
        yield optimizer


def end_script(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def list_frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_ends_with_the_line_of_the_script(optimizer: gradpost.RemoteOptimizer, shown: Shown) -> None:
    before = sys.excepthook
    with pytest.raises(NonFiniteGradient) as caught:
        optimizer.step()
    assert "decorate_context" in list_frames(caught.value)  # a wrapper of torch
    end_script(caught.value)
    assert list_frames(caught.value) == ["test_a_traceback_ends_with_the_line_of_the_script"]
    assert shown == [(NonFiniteGradient, caught.value, caught.value.__traceback__)]
    assert traceback.format_exception_only(caught.value)[0].startswith("gradpost.NonFiniteGradient: trainer 0 has NaN")
    assert sys.excepthook is before


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda _: gradpost.RemoteOptimizer("adam"), "TypeError"),  # type: ignore[arg-type]
        (lambda optimizer: optimizer.add_param_group({"params": []}), "gradpost.BadModel"),
        (lambda optimizer: optimizer._wrapped.add_param_group({"params": []}), "gradpost.BadModel"),
        (lambda optimizer: optimizer._wrapped.step(), "gradpost.BadModel"),
        (lambda optimizer: optimizer._wrapped.load_state_dict({}), "gradpost.BadModel"),
        (pickle.dumps, "TypeError"),
        (lambda _: gradpost.RemoteOptimizer(torch.optim.SGD([torch.ones(1)]), bucket_size=1), "TypeError"),
    ],
)
def test_calls_that_are_refused_show_no_frames_either(
    optimizer: gradpost.RemoteOptimizer, shown: Shown, call: Callable[[Any], object], name: str
) -> None:
    with pytest.raises(Exception) as caught:
        call(optimizer)
    end_script(caught.value)
    assert {"<lambda>", "test_calls_that_are_refused_show_no_frames_either"} >= {*list_frames(caught.value)}
    assert traceback.format_exception_only(caught.value)[0].startswith(f"{name}: ")
    assert len(shown) == 1


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_cause_of_an_error_is_kept(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADPOST_LOG_LEVEL", level)
    with pytest.raises(Unreachable) as caught:
        gradpost.connect(coordinator="localhost:9", retry_seconds=0.1)
    cause = caught.value.__cause__
    assert isinstance(cause, httpx.ConnectError)
    assert (cause.__traceback__ is None, cause.__cause__ is None) == ((level == "info"),) * 2
    assert ("_request_with_retry" in list_frames(caught.value)) == (level == "debug")


@hide_frames
def fail(error: GradpostError) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (TrainerLost("trainer 1 failed: KeyError: 3"), "gradpost: trainer 1 failed: KeyError: 3\n"),
        (RunStopped("an administrator stopped run a"), "gradpost: an administrator stopped run a\n"),
        (BadInput("no"), None),
    ],
)
def test_a_script_that_others_have_ended_shows_one_line(
    error: GradpostError, output: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # the script catches the first one
        with pytest.raises(type(error)):
            fail(error)
    end_script(error)
    assert sys.excepthook is sys.__excepthook__
    shown = capsys.readouterr().err
    assert shown == output if output else shown.startswith("Traceback (most recent call last):\n")


# ---------------------------------------------------------------------- metrics and the log


@contextmanager
def serving(tls: TlsFiles = TlsFiles()) -> Iterator[str]:  # noqa: B008 - frozen
    """Yield the address of the page."""
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry)
    server = MetricsServer(registry, "127.0.0.1", 0, tls)
    try:
        yield f"{server.address}/metrics"
    finally:
        server.close()


def test_the_port_needs_no_token_and_is_free_once_it_is_closed() -> None:
    with serving() as url:
        assert "steps_total" in httpx.get(url).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_with_tls_a_reader_needs_a_certificate_and_a_silent_one_blocks_nothing(authority: Authority) -> None:
    client, files = authority.issue("client"), authority.issue("metrics")
    with serving(files) as url, socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)):
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=client_context(client), timeout=10) as http:
            assert "steps_total" in http.get(url).text
        with httpx.Client(verify=client_context(TlsFiles(client.ca))) as http, pytest.raises(httpx.TransportError):
            http.get(url)


def test_a_trainer_that_cannot_join_frees_its_metrics_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unreachable):
        RunClient(read_settings(coordinator="http://127.0.0.1:9", retry_seconds=0.1, metrics_port=port)).join()
    with socket.create_server(("127.0.0.1", port)):
        pass


# ---------------------------------------------------------------- log


def test_text_of_other_trainers_neither_breaks_lines_nor_controls_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    make_log(trainer=0).info("trainer 1 failed: no data\nforged\x1b[2A", error="a\nb")
    assert terminal.getvalue().count("\n") == 1
    assert "\x1b[2A" not in terminal.getvalue()
