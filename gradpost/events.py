"""`gradpost events`: the events of a cluster, past and current."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ps_protocol.errors import Unreachable
from trainer_client.inspection import ClusterView

from .output import print_line, warn
from .status import asking

RETRY_SECONDS = 1.0


def show_events(coordinator: str | None, token_file: Path | None, *, follow: bool, as_json: bool) -> None:
    """Print the newest thousand events, and with `follow` the next ones until Ctrl-C."""
    with asking(coordinator, token_file) as view, suppress(KeyboardInterrupt) if follow else nullcontext():
        for event in _follow(view) if follow else view.events():
            if as_json:
                print(json.dumps(event), flush=True)
                continue
            at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
            print_line(f"{at}  round {event['round']:>7,}  {event['text']}", flush=True)


def _follow(view: ClusterView) -> Iterator[dict[str, Any]]:
    """Yield events without an end, over restarts of the coordinator. Raises Unreachable if it is not there at first."""
    view.status()
    newest, is_unreachable = 0, False
    while True:
        with suppress(Unreachable):
            for event in view.follow_events(newest):
                newest, is_unreachable = event["id"], False
                yield event
        if not is_unreachable:
            warn(f"the coordinator at {view.coordinator} is unreachable; trying again until Ctrl-C")
        is_unreachable = True
        time.sleep(RETRY_SECONDS)
