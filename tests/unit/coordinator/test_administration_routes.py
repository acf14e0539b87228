"""What an administrator sends, before anything is done with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from services.coordinator import administration_routes
from services.runtime import routing

from ...docs.apps import call, run_coordinator

pytestmark = pytest.mark.asyncio


async def test_values_are_no_json_whatever_bytes_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.042 has a comma among its bytes."""
    monkeypatch.setattr(routing, "MAX_MESSAGE_ITEMS", 500)
    monkeypatch.setattr(administration_routes, "current_plan", lambda _: None)
    spec: Any = SimpleNamespace(shape=(999,), dtype="F32")
    monkeypatch.setattr(administration_routes, "find_parameter", lambda plan, name: (spec, ()))
    async with run_coordinator() as app, call(app) as http:
        refused = await http.put("/v1/parameters/w", content=save({"w": torch.full((1000,), 0.042)}))
        assert (refused.status_code, refused.json()["code"]) == (422, "wrong_shape")
