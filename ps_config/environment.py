"""Names of all settings, for servers and trainers alike, so that a misspelt one is never silently ignored.

A setting `round_timeout_seconds` is the variable `GRADPOST_ROUND_TIMEOUT_SECONDS` in the environment and the key
`round_timeout_seconds` in the TOML file that `GRADPOST_SETTINGS_FILE` names. Both may hold settings of every role,
so that one environment or file serves a whole cluster; each role reads its own.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

PREFIX = "GRADPOST_"
SETTINGS_FILE_VARIABLE = "GRADPOST_SETTINGS_FILE"

_EVERY_SERVICE = {
    "GRADPOST_HOST",
    "GRADPOST_PORT",
    "GRADPOST_ADVERTISE_ADDRESS",
    "GRADPOST_LEASE_SECONDS",
    "GRADPOST_EXIT_WHEN_DONE",
    "GRADPOST_LOG_FORMAT",
    "GRADPOST_LOG_LEVEL",
    "GRADPOST_ALLOWED_HOSTS",
    "GRADPOST_MAX_BODY_BYTES",
    "GRADPOST_MAX_HEADER_BYTES",
    "GRADPOST_MAX_TENSORS",
    "GRADPOST_STATE_DIR",
    "GRADPOST_CHECKPOINTS",
    "GRADPOST_FAILPOINTS",
    "GRADPOST_MAX_REQUESTS",
    "GRADPOST_MAX_CONNECTIONS",
    "GRADPOST_HEADER_TIMEOUT_SECONDS",
    "GRADPOST_BODY_TIMEOUT_SECONDS",
    "GRADPOST_READY_FD",
}
_COORDINATOR = {
    "GRADPOST_NUM_PSERVERS",
    "GRADPOST_NUM_TRAINERS",
    "GRADPOST_MAX_TRAINERS",
    "GRADPOST_LAST_CALL_SECONDS",
    "GRADPOST_ROUND_TIMEOUT_SECONDS",
    "GRADPOST_ON_TRAINER_LOSS",
    "GRADPOST_MIN_TRAINERS",
    "GRADPOST_REJOIN_TIMEOUT_SECONDS",
    "GRADPOST_DURABILITY",
    "GRADPOST_CHECKPOINT_ROUNDS",
    "GRADPOST_MAX_LOG_BYTES",
    "GRADPOST_KEEP_CHECKPOINTS",
    "GRADPOST_RESUME",
}
_PSERVER = {
    "GRADPOST_HTTP2",
    "GRADPOST_MAX_INFLIGHT_BYTES",
    "GRADPOST_PSERVER_INDEX",
    "GRADPOST_THREADS",
}
_TRAINER = {
    "GRADPOST_ACCUMULATE_STEPS",
    "GRADPOST_BUCKET_BYTES",
    "GRADPOST_LOCAL_STEPS",
    "GRADPOST_MAX_GRAD_NORM",
    "GRADPOST_ONE_TRAINER_PER_HOST",
    "GRADPOST_OUTER_LR",
    "GRADPOST_OUTER_MOMENTUM",
    "GRADPOST_OUTER_NESTEROV",
    "GRADPOST_OVERLAP",
    "GRADPOST_OVERLAP_PULLS",
    "GRADPOST_RETRY_SECONDS",
    "GRADPOST_METRICS_HOST",
    "GRADPOST_METRICS_PORT",
}
_SEVERAL_ROLES = {
    SETTINGS_FILE_VARIABLE,
    "GRADPOST_COORDINATOR",
    "GRADPOST_TLS_CERT",
    "GRADPOST_TLS_KEY",
    "GRADPOST_TLS_CA",
    "GRADPOST_TLS_CLIENT_CA",
    "GRADPOST_TLS_CLIENT_CERT",
    "GRADPOST_TLS_CLIENT_KEY",
    "GRADPOST_TOKENS_DIR",
    "GRADPOST_TOKEN_FILE",
    "GRADPOST_INSECURE",
    "GRADPOST_LOCAL_TRANSPORT",
    "GRADPOST_MODE",
    "GRADPOST_STRATEGY",
    "GRADPOST_MAX_DELAY",
    "GRADPOST_MAX_STALENESS",
    "GRADPOST_WAIT_FOR_APPLY",
    "GRADPOST_READ_CONSISTENCY",
    "GRADPOST_MAX_QUEUED",
    "GRADPOST_COMPENSATION",
    "GRADPOST_DC_LAMBDA",
    "GRADPOST_MIN_BLOCK_SIZE",
    "GRADPOST_PLACEMENT",
    "GRADPOST_SLICE_PARAMETERS",
    "GRADPOST_NONFINITE",
    "GRADPOST_PUSH_TYPE",
    "GRADPOST_PULL_TYPE",
    "GRADPOST_TOPK",
}

KNOWN_VARIABLES: frozenset[str] = frozenset(_EVERY_SERVICE | _COORDINATOR | _PSERVER | _TRAINER | _SEVERAL_ROLES)


class SettingsError(ValueError):
    """Settings that cannot be used as given; the message says which and what to write instead."""


def check_base_url(url: str) -> str:
    """The base URL of a service without a slash at its end; ValueError if it is none."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"expected a base URL such as http://10.0.0.5:7070, got {url!r}")
    return url.rstrip("/")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError if a variable has our prefix and is no setting of any role, suggesting the nearest one."""
    unknown = sorted(
        name for name in environ if name.upper().startswith(PREFIX) and name.upper() not in KNOWN_VARIABLES
    )
    if not unknown:
        return
    message = "; ".join(_complain(name, KNOWN_VARIABLES, "environment variable") for name in unknown)
    if "KUBERNETES_SERVICE_HOST" in environ:
        message += " (Kubernetes adds variables named after Services: set enableServiceLinks: false in the pod)"
    raise SettingsError(message)


def read_settings_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the TOML file that the environment names; empty without one. Blocks on the disk.

    Raises SettingsError if it cannot be read or holds a key that is no setting of any role.
    """
    name = environ.get(SETTINGS_FILE_VARIABLE)
    if not name:
        return {}
    try:
        values = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # tomllib's and the decoder's errors are ValueErrors
        raise SettingsError(f"{SETTINGS_FILE_VARIABLE}={name} cannot be read: {error}") from error
    known = {variable.removeprefix(PREFIX).lower() for variable in KNOWN_VARIABLES - {SETTINGS_FILE_VARIABLE}}
    if unknown := sorted(set(values) - known):
        raise SettingsError("; ".join(_complain(key, known, f"key in {name}") for key in unknown))
    return values


def _complain(name: str, known: Collection[str], what: str) -> str:
    """Name the unknown one and its nearest neighbour.

    >>> _complain("GRADPOST_COORDINATR", KNOWN_VARIABLES, "environment variable")
    'unknown environment variable GRADPOST_COORDINATR; did you mean GRADPOST_COORDINATOR?'
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name}" + (f"; did you mean {near[0]}?" if near else "")
