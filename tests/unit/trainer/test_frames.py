"""The tracebacks of the errors of Gradpost in a script."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import httpx
import pytest
import torch

import gradpost
from gradpost import BadInput, GradpostError, NonFiniteGradient, RunStopped, TrainerLost, Unreachable
from trainer_client.session.script import hide_frames

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
