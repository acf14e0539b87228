"""A pserver that is being registered while its disk is slow, and the coordinator is not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ps_protocol.messages import PserverRegistered
from services.pserver.durable.disk import Disk

from .support import bench


class SlowDisk(Disk):
    """Needs leave to write an identity down."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def register(self, index: int, incarnation: int) -> None:
        self.begun.set()
        assert self.may_end.wait(10)
        super().register(index, incarnation)


@pytest.mark.asyncio
async def test_a_run_that_comes_before_the_identity_is_on_the_disk_waits_for_it_and_stays(tmp_path: Path) -> None:
    async with bench() as b:
        b.pserver.disk = disk = SlowDisk(tmp_path)
        answer = PserverRegistered(index=0, incarnation=2, lease_seconds=10)
        registering = asyncio.create_task(b.pserver.registered(answer))
        await asyncio.to_thread(disk.begun.wait, 10)
        installing = asyncio.create_task(b.install_next_run(incarnation=2, durability="log"))
        await asyncio.sleep(0.05)  # it does not use the disk meanwhile
        assert not installing.done()
        disk.may_end.set()
        await asyncio.gather(registering, installing)
        assert b.run.install.run == "run2"
        assert disk.folder is not None
        assert disk.folder.identity.run == b.run.install
