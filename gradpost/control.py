"""The commands that change a run while it trains: `gradpost pause`, `resume`, `rate`, `freeze`, `unfreeze`, `evict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from ps_protocol.routes import EVICT, FROZEN, PAUSE, RATE, RESUME
from trainer_client.client.inspection import ClusterView

from .output import CommandError, print_line
from .status import print_answer


class RunChange:
    """One change of the run that trains. Each method waits until every pserver has it, and prints from when it applies.

    They raise CommandError without the coordinator, and GradpostError if it refuses the change.
    """

    def __init__(self, coordinator: str | None, token_file: Path | None, *, as_json: bool) -> None:
        self._coordinator = coordinator
        self._token_file = token_file
        self._as_json = as_json

    def pause(self) -> None:
        """Pause the run."""
        self._make("POST", PAUSE, "is paused")

    def resume(self) -> None:
        """Resume a paused run."""
        self._make("POST", RESUME, "continues")

    def set_rate(self, rate: float | None, group: int | None, *, reset: bool) -> None:
        """Set a learning rate of one parameter group or all, or end that with `reset`."""
        if (rate is None) != reset:
            raise CommandError("give a learning rate, or --reset to use the script's own again")
        which = "all parameter groups" if group is None else f"parameter group {group}"
        what = f"uses the script's learning rate for {which}" if reset else f"uses learning rate {rate:g} for {which}"
        self._make("PUT", RATE, what, {"rate": rate, "group": group})

    def freeze(self, name: str) -> None:
        """Freeze a parameter."""
        self._set_frozen(name, "PUT", "does not change")

    def unfreeze(self, name: str) -> None:
        """Unfreeze a parameter."""
        self._set_frozen(name, "DELETE", "changes")

    def evict(self, rank: int) -> None:
        """Continue without a trainer."""
        self._make("POST", EVICT.format(rank=rank), f"trains without trainer {rank}")

    def _set_frozen(self, name: str, method: Literal["PUT", "DELETE"], verb: str) -> None:
        self._make(method, FROZEN.replace("{name:path}", quote(name)), f"{verb} parameter {name}")

    def _make(self, method: str, path: str, outcome: str, message: dict[str, Any] | None = None) -> None:
        def change(view: ClusterView) -> dict[str, Any]:
            return view.change_run(method, path, message)

        def show(done: dict[str, Any]) -> None:
            print_line(f"run {done['run']} {outcome} from round {done['round']:,} on")

        print_answer(self._coordinator, self._token_file, change, show, as_json=self._as_json, scope="admin")
