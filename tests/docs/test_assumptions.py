"""docs/assumptions.md: the time-outs are those of the code, the errors exist, every optimizer has been measured."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from pydantic_settings import BaseSettings

from ps_protocol.errors import ERRORS
from ps_protocol.optimizers import RULES
from services.runtime.settings import ServiceSettings
from trainer_client.settings import TrainerSettings

from ..cluster.parity_model import OPTIMIZERS, STEPS
from ..cluster.test_parity import CUTS, make_net
from .markdown import codes, read, section, tables

TEXT = read("assumptions.md")
TIMEOUTS = tables(section(TEXT, "Time-outs"))[0]


@pytest.mark.parametrize("row", TIMEOUTS, ids=lambda row: row["what"])
def test_the_timeouts(row: dict[str, str]) -> None:
    module, _, name = codes(row["in the code"])[0].rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if row["setting"]:
        assert issubclass(value, BaseSettings)
        value = value.model_fields[codes(row["setting"])[0]].default
    assert float(row["seconds"]) == value


def test_the_errors_exist() -> None:
    rows = tables(section(TEXT, "What ends a run, and how soon"))[0]
    named = {code for row in rows for code in codes(row["what the others get"])}
    assert {name for name in named if "_" in name} <= ERRORS.keys()
    assert "trainer_lost" in named


def test_loopback_is_the_default() -> None:
    assert "listen on 127.0.0.1 unless told otherwise" in TEXT
    assert ServiceSettings.model_fields["host"].default == "127.0.0.1"
    assert TrainerSettings.model_fields["metrics_host"].default == "127.0.0.1"


def test_what_was_measured_is_what_is_tested() -> None:
    numbers = section(TEXT, "Numbers")
    rows = tables(numbers)[0]
    assert {row["optimizer"].partition(",")[0] for row in rows} == RULES.keys()
    assert len(rows) == len(OPTIMIZERS)
    measured = [float(row[column].removesuffix("·lr")) for row in rows for column in ("2 trainers", "3 trainers")]
    bound = re.search(r"no element may differ by more than ([\d.]+) times the learning rate", numbers)
    assert bound
    assert max(measured) <= float(bound[1])
    assert STEPS == 10
    assert "After ten steps" in numbers
    assert f"blocks of {CUTS[0]}, {CUTS[1]} and {CUTS[2]} elements" in numbers
    num_parameters = sum(p.numel() for p in make_net().parameters())
    assert f"{num_parameters:,} parameters" in numbers
    assert all(hasattr(torch.optim, name) for name in RULES)
