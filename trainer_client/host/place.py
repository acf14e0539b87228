"""Where a process stands among those that torchrun has started, on its host and on all.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_config.environment import SettingsError
from ps_protocol.vocabulary import Rank


@dataclass(frozen=True)
class HostPlace:
    """One process of a host that is a trainer with several of them."""

    rank: int  # among the processes of all hosts
    world_size: int
    process: int  # on this host; 0 leads
    num_processes: int
    trainer: Rank  # which trainer of the run the host is
    num_trainers: int


_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "process": "LOCAL_RANK",
    "num_processes": "LOCAL_WORLD_SIZE",
    "trainer": "GROUP_RANK",
    "num_trainers": "GROUP_WORLD_SIZE",
}


def find_place(environ: Mapping[str, str]) -> HostPlace | None:
    """What torchrun says; None without torchrun, or with one process on each host, which is a trainer by itself.

    `gradpost up` sets LOCAL_RANK and LOCAL_WORLD_SIZE, too, for trainers that are one process each. Raises
    SettingsError if torchrun's variables are not all there.

    >>> environ = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "3", "GROUP_WORLD_SIZE": "4"}
    >>> find_place({**environ, "RANK": "7", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"})
    HostPlace(rank=7, world_size=8, process=1, num_processes=2, trainer=3, num_trainers=4)
    >>> find_place(environ) is None
    True
    """
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    try:
        return HostPlace(**{field: int(environ[variable]) for field, variable in _VARIABLES.items()})
    except (KeyError, ValueError) as error:
        needed = ", ".join(_VARIABLES.values())
        raise SettingsError(f"torchrun sets {needed}, and here one of them is missing or no number: {error}") from None
