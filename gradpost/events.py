"""`gradpost events`: what has happened in a cluster, and what happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ps_protocol.errors import GradpostError

from .output import EXIT_FAILED, CommandError, print_line
from .status import open_view


def show_events(coordinator: str | None, token_file: Path | None, *, follow: bool, as_json: bool) -> None:
    """Print the newest thousand, and with `follow` those that come, until the coordinator ends. Raises CommandError."""
    with open_view(coordinator, token_file) as view:
        try:
            events: Iterable[dict[str, Any]] = view.follow_events() if follow else view.events()
            for event in events:
                if as_json:
                    print(json.dumps(event), flush=True)
                    continue
                at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
                print_line(f"{at}  round {event['round']:>7,}  {event['text']}", flush=True)
        except GradpostError as error:
            raise CommandError(str(error), exit_code=EXIT_FAILED) from None
