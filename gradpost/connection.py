"""The connection of a command to the coordinator: which one, with which token and certificates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ps_config.certificates import TlsFiles, client_files
from ps_config.environment import check_base_url, check_environment, find_path, find_setting
from ps_config.tokens import Scope
from ps_protocol.errors import Forbidden, Unauthenticated, Unreachable
from ps_protocol.fields import Message
from trainer_client.client.inspection import ClusterView

from .output import EXIT_FAILED, CommandError, print_json, warn
from .state_folder import named_root, running_address

DEFAULT_COORDINATOR = "http://127.0.0.1:7070"
TIMEOUT_SECONDS = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection:
    """The coordinator's address, and the credentials for it and the pservers."""

    address: str
    tls: TlsFiles
    token_file: Path | None

    def open(self, timeout_seconds: float = TIMEOUT_SECONDS) -> ClusterView:
        """Return a client of the coordinator."""
        return ClusterView(self.address, tls=self.tls, token_file=self.token_file, timeout_seconds=timeout_seconds)


def find_address(coordinator: str | None) -> str | None:
    """Return the coordinator's address that is given, set, or written by the newest `up`; None for the default."""
    return coordinator or find_setting("coordinator") or running_address(named_root())


def find_connection(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Connection:
    """Return the connection that options, environment and settings file name, in this order.

    The default token is that of `scope` in `tokens_dir`. Raises CommandError for a bad address, and SettingsError.
    """
    check_environment(os.environ)
    try:
        address = check_base_url(find_address(coordinator) or DEFAULT_COORDINATOR)
    except ValueError as error:
        raise CommandError(f"the coordinator's address: {error}") from None
    folder = find_path("tokens_dir")
    token_file = token_file or find_path("token_file") or (folder and folder / scope)
    return Connection(address, client_files(), token_file)


@contextmanager
def asking(coordinator: str | None, token_file: Path | None = None, scope: Scope = "read") -> Iterator[ClusterView]:
    """Yield a client of the coordinator; convert connection errors to CommandError with advice."""
    with find_connection(coordinator, token_file, scope).open() as view:
        if find_address(coordinator) is None:  # perhaps the run of another user
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
