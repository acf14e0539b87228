"""The connection of a command to the coordinator: which one, with which token and certificates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ps_config.certificates import client_files
from ps_config.environment import check_base_url, check_environment, find_path, find_setting
from ps_config.tokens import Scope
from ps_protocol.errors import Forbidden, Unauthenticated, Unreachable
from ps_protocol.fields import Message
from trainer_client.client.inspection import ClusterView

from .output import EXIT_FAILED, CommandError, print_json, warn
from .state_folder import named_root, running_address

DEFAULT_COORDINATOR = "http://127.0.0.1:7070"

T = TypeVar("T")


@contextmanager
def asking(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Iterator[ClusterView]:
    """Yield a client of the coordinator that the option, the environment, the settings file or the newest `up` names.

    The default token is that of `scope` in `tokens_dir`. Raises SettingsError, and CommandError for a bad address and,
    with advice, for errors of the connection.
    """
    check_environment(os.environ)
    found = coordinator or find_setting("coordinator") or running_address(named_root())
    try:
        address = check_base_url(found or DEFAULT_COORDINATOR)
    except ValueError as error:
        raise CommandError(f"the coordinator's address: {error}") from None
    folder = find_path("tokens_dir")
    token_file = token_file or find_path("token_file") or (folder and folder / scope)
    with ClusterView(address, tls=client_files(), token_file=token_file) as view:
        if found is None:  # perhaps the run of another user
            warn(f"no `gradpost up` of this folder is running; using the coordinator at {view.coordinator}")
        try:
            yield view
        except (Unauthenticated, Forbidden) as error:
            text = (
                f"the coordinator refuses the request: {error}. Give a token with --token-file or GRADPOST_TOKENS_DIR"
            )
            raise CommandError(text, exit_code=EXIT_FAILED) from None
        except Unreachable as error:
            text = f"no coordinator: {error}. Give its address with --coordinator or GRADPOST_COORDINATOR"
            raise CommandError(text, exit_code=EXIT_FAILED) from None


def print_answer(
    coordinator: str | None,
    token_file: Path | None,
    fetch: Callable[[ClusterView], T],
    show: Callable[[T], None],
    *,
    as_json: bool,
    scope: Scope = "read",
) -> None:
    """Print the result of `fetch`: as JSON, or with `show`."""
    with asking(coordinator, token_file, scope) as view:
        answer = fetch(view)
    if as_json:
        print_json(json.loads(answer.model_dump_json()) if isinstance(answer, Message) else answer)
    else:
        show(answer)
