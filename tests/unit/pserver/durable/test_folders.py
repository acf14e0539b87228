"""The choice among the folders of one index: that of the pserver, and those of standbys, which may be promoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.pserver.durable.disk import (
    IDENTITY,
    Disk,
    FolderTaken,
    StateFolder,
    list_folders,
    open_folder,
    open_standby_folder,
)

from .support import flip


def make_folder(state: Path, copy: int, incarnation: int, *, locked: bool = False) -> None:
    folder = StateFolder(state, 0, copy)
    folder.write_identity(incarnation, None)
    if not locked:
        folder.close()


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({}, [], 0),
        ({0: 3, 1: 0}, [], 0),
        ({0: 1, 1: 2, 2: 0}, [], 1),
        ({0: 2, 1: 2}, [], 0),
        ({1: 0}, [], 1),  # only the folder of a standby is left
        ({2: 0, 10: 4}, [], 10),
        ({0: 1, 1: 2}, [1], 0),  # the old leader restarts beside its successor
        ({0: 1, 1: 0}, [1], 0),
        ({1: 0}, [1], 0),  # the standby lives, and the pserver has lost its disk
        ({0: 1, 1: 0}, [0], None),  # a second process of a living pserver does not take the folder of a standby
        ({0: 1, 1: 2}, [0, 1], None),
    ],
)
def test_a_pserver_opens_the_folder_with_the_newest_incarnation(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: int | None
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    if expected is None:
        with pytest.raises(FolderTaken):
            open_folder(tmp_path, 0)
        assert open_folder(tmp_path, None) is None
        return
    folder = open_folder(tmp_path, 0)
    assert folder is not None
    assert folder.path.name == ("pserver-0" if expected == 0 else f"pserver-0-{expected}")


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({}, [], 1),
        ({0: 2}, [0], 1),
        ({0: 2}, [], 1),  # the leader has just ended, and may restart
        ({0: 3, 1: 0}, [], 1),
        ({0: 2, 1: 0}, [0, 1], 2),
        ({0: 1, 1: 2}, [1], 0),  # of an old leader
        ({0: 1, 1: 2, 2: 0}, [1], 2),
        ({0: 0}, [], 1),  # of a pserver that has not registered
    ],
)
def test_a_standby_takes_the_oldest_folder_that_no_pserver_needs(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: int
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    folder = open_standby_folder(tmp_path, 0, incarnation=2)
    assert folder.path.name == ("pserver-0" if expected == 0 else f"pserver-0-{expected}")


@pytest.mark.parametrize(
    ("folders", "locked", "expected"),
    [
        ({0: 1, 1: 2}, [], True),
        ({0: 1, 1: 2}, [1], False),
        ({0: 2, 1: 0}, [], False),  # the pserver restarts with it
        ({0: 1, 1: 1}, [], False),
    ],
)
def test_a_standby_leads_again_with_a_free_folder_of_the_newest_incarnation(
    tmp_path: Path, folders: dict[int, int], locked: list[int], expected: bool
) -> None:
    for copy, incarnation in folders.items():
        make_folder(tmp_path, copy, incarnation, locked=copy in locked)
    assert Disk(tmp_path, None).has_free_folder(0, incarnation=2) == expected
    if expected:
        StateFolder(tmp_path, 0, 1)  # it is not locked


def test_a_folder_with_a_damaged_identity_is_not_taken(tmp_path: Path) -> None:
    make_folder(tmp_path, 1, 0)
    flip(tmp_path / "pserver-0-1" / IDENTITY)
    assert open_standby_folder(tmp_path, 0, incarnation=2).path.name == "pserver-0-2"


def test_other_names_are_no_folders(tmp_path: Path) -> None:
    for name in ("pserver-x", "pserver-1-0", "pserver-1-2-3", "pserver-11", "pserver-1-2", "pserver-1"):
        (tmp_path / name).mkdir()
    assert list_folders(tmp_path) == [(1, 0), (1, 2), (11, 0)]
