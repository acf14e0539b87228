"""The fail-over of a shard to this standby: the coordinator fences it, and then promotes it or another one.

PUT fence ──► the replica stays as it is ──► PUT promote ──► this process is the pserver, and reads no file
                        │
                        └── the coordinator names a later incarnation ──► the standby follows again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI, Response

from ps_protocol import routes
from ps_protocol.errors import StalePserver
from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.standbys import FenceStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.runtime.logs import get_logger

from ..durable.disk import describe_held
from ..pserver import Pserver
from .follower import Follower

log = get_logger()


class Promotion:
    """The answers of a standby to the coordinator's requests of a fail-over. Lives on the event loop."""

    def __init__(
        self,
        follower: Follower,
        pserver: Pserver,
        *,
        http2: bool,
        local: str | None,
        on_promoted: Callable[[PserverRegistered], None],
    ) -> None:
        self.address = ""  # set before the first request
        self.registered: PserverRegistered | None = None  # once this process is the pserver
        self._follower = follower
        self._pserver = pserver
        self._http2 = http2
        self._local = local
        self._on_promoted = on_promoted
        self._promoting = asyncio.Lock()

    async def fence(self, message: FenceStandby) -> RegisterPserver:
        """Fence the replica: see `Follower.fence`. Return the registration of this process as the pserver."""
        async with self._promoting:
            self._check_standby()
            replica = await self._follower.fence(message)
            return RegisterPserver(
                protocol=PROTOCOL_VERSION,
                instance=self._pserver.instance,
                address=self.address,
                http2=self._http2,
                local=self._local,
                index=self._follower.index,
                previous=replica.installed.incarnation,
                held=describe_held(replica.storage, replica.installed, replica.restored),
            )

    def _check_standby(self) -> None:
        if self.registered is not None:
            text = f"this process has been promoted, and is pserver {self.registered.index}"
            raise StalePserver(text, current=self.registered.incarnation)

    async def promote(self, answer: PserverRegistered) -> None:
        """Become the pserver. A repeated request changes nothing.

        Raises NotReady, StalePserver, and StorageFailed, after which the request can be repeated.
        """
        async with self._promoting:
            if self.registered == answer:
                return
            self._check_standby()
            self._follower.check_release(answer)
            await self._pserver.write_identity(answer)
            replica = self._follower.release_replica(answer)
            await self._pserver.take_over(answer, replica.installed, replica.restored)
            self.registered = answer
            log.info("promoted", pserver=answer.index, incarnation=answer.incarnation, round=replica.round)
            self._on_promoted(answer)


def add_promotion_routes(app: FastAPI, promotion: Promotion) -> None:
    """Add the routes with which the coordinator makes a standby the pserver."""

    @app.put(routes.FENCE_STANDBY, tags=["control"])
    async def fence_standby(message: FenceStandby) -> RegisterPserver:
        """Confirm and apply no update of an incarnation of the pserver, or an earlier one, from now on."""
        return await promotion.fence(message)

    @app.put(routes.PROMOTE_STANDBY, tags=["control"], status_code=204, response_class=Response)
    async def promote_standby(message: PserverRegistered) -> None:
        """Become the pserver, after a fence."""
        await promotion.promote(message)
