"""The worked examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ps_config
import ps_http2
import ps_protocol

MODULES = [
    *(
        f"{package.__name__}.{module.name}"
        for package in (ps_config, ps_http2, ps_protocol)
        for module in pkgutil.iter_modules(package.__path__)
    ),
    "services.pserver.history",
    "services.runtime.scopes",
    "services.runtime.statistics",
    "gradpost.output",
    "gradpost.plan",
    "benchmarks.wire.strategies",
    "trainer_client.grad_scaler",
    "trainer_client.flat_buckets",
    "trainer_client.host.rendezvous",
    "trainer_client.round_results",
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_some() -> None:
    modules = map(importlib.import_module, MODULES)
    assert sum(len(test.examples) for module in modules for test in doctest.DocTestFinder().find(module)) > 10
