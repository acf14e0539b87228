"""The routes of the history of runs, and a service that serves the page and the history without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from fastapi import FastAPI

from ps_protocol import routes
from ps_protocol.fields import Identifier
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import run_service, serve
from services.runtime.settings import ServiceSettings

from ..history import HistoryEntry, HistoryRecord, RunHistory
from .routes import add_dashboard_routes


def add_history_routes(app: FastAPI, history: RunHistory) -> None:
    """Add the routes to the application."""

    @app.get(routes.HISTORY, tags=["inspection"])
    async def list_history() -> list[HistoryEntry]:
        """Return the runs that have trained and ended, newest first."""
        return await asyncio.to_thread(history.entries)

    @app.get(routes.HISTORY_RUN, tags=["inspection"])
    async def read_history(run: Identifier) -> HistoryRecord:
        """Return a run of the history: its status at the end, its summary and its curves."""
        return await asyncio.to_thread(history.read, run)


def serve_history(history: RunHistory, host: str, port: int, on_started: Callable[[str], None]) -> NoReturn:
    """Run a process that serves the page and the history without tokens, until it is stopped.

    `host` must be a loopback address. `on_started` is called with the address.
    """
    settings = ServiceSettings.model_construct(host=host, port=port)  # not those of a cluster in the environment

    async def main(stop: asyncio.Event) -> int:
        metrics = ServiceMetrics("dashboard")
        app = make_app(title="Gradpost history", role="dashboard", metrics=metrics, is_ready=lambda: None)
        add_history_routes(app, history)
        add_dashboard_routes(app, kept_runs=str(history.folder))
        await serve(app, settings, stop=stop, on_started=on_started)
        return 0

    run_service(main)
