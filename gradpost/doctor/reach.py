"""What this machine finds at the address of each pserver: whether it is that very pserver, how far and how fast.

Every step has a time-out, so that a dead or slow one costs seconds. All are looked at side by side; then the speed of
one after the other is measured, which sends and fetches `SPEED_BYTES` at most.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from ps_protocol.errors import GradpostError
from ps_protocol.messages import PserverState, PserverStatus
from ps_protocol.routes import HEALTH, METRICS, SPEED, STATE
from ps_protocol.tokens import TokenPair
from trainer_client.answers import raise_for_problem
from trainer_client.transport.authorization import BearerAuth
from trainer_client.transport.connections import make_bulk_client, make_control_client
from trainer_client.transport.extensions import BODY_EXTENSION

from ..status import Connection

REACH_SECONDS = 5.0
SPEED_BYTES = 8_000_000  # each way
PILOT_BYTES = 64 * 1024  # say how many of them take about a second
SPEED_SECONDS = 5.0  # of one request
ALL_SPEEDS_SECONDS = 30.0  # whoever's turn does not come by then is not measured


@dataclass(slots=True)
class Reached:
    """A service as this machine sees it. Speeds are in bytes a second."""

    address: str
    trouble: str = ""  # why it is not reached, or not all is known
    state: PserverState | None = None
    round_trip_seconds: float | None = None
    clock_seconds: float | None = None  # how far its clock is ahead of ours, give or take half a second
    disk: tuple[float, float] | None = None  # free bytes, size
    http_version: str = ""  # by which tensors travel, or would if trainers tried it, as it says itself
    speed_to: float | None = None
    speed_from: float | None = None


async def reach_all(
    connection: Connection, pservers: Sequence[PserverStatus], *, with_speed: bool
) -> tuple[Reached, list[Reached]]:
    """The coordinator, and the pservers in that order."""
    auth = None if connection.token_file is None else BearerAuth(TokenPair(connection.token_file))
    coordinator = Reached(connection.address)
    reached = [Reached(pserver.address) for pserver in pservers]
    async with (
        make_control_client(connection.tls, auth) as control,
        make_bulk_client(connection.tls, auth, http2=True) as http2,
        make_bulk_client(connection.tls, auth, http2=False) as http1,
    ):
        await asyncio.gather(
            _bounded(coordinator, _time_health(control, coordinator)),
            *(_bounded(one, _look(control, one)) for one in reached),
        )
        give_up = time.monotonic() + ALL_SPEEDS_SECONDS
        for pserver, one in zip(pservers, reached, strict=True):
            if one.state is not None:
                is_on_time = with_speed and time.monotonic() < give_up
                clients = (http2, http1) if pserver.http2 else (http1,)
                await _bounded(one, _measure(clients, one, with_speed=is_on_time), 4 * SPEED_SECONDS)
    return coordinator, reached


async def _bounded(one: Reached, work: Coroutine[Any, Any, None], seconds: float = REACH_SECONDS) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        one.trouble = f"no answer within {seconds:g} s"
    except socket.gaierror as error:
        one.trouble = f"the name {urlsplit(one.address).hostname} is not known here: {error.strerror}"
    except (httpx.TransportError, GradpostError, OSError, ValueError) as error:
        one.trouble = str(error) or type(error).__name__


async def _look(http: httpx.AsyncClient, one: Reached) -> None:
    url = urlsplit(one.address)
    await asyncio.get_running_loop().getaddrinfo(url.hostname, url.port)  # its error says more than a connection's
    await _time_health(http, one)
    try:
        one.state = PserverState.model_validate_json((await _get(http, one.address + STATE)).content)
    except ValidationError:
        one.trouble = "something else answers there: is it Gradpost, and of this version?"
        return
    values = {
        family.name: family.samples[0].value
        for family in text_string_to_metric_families((await _get(http, one.address + METRICS)).text)
        if family.name.startswith("gradpost_disk_") and family.samples
    }
    if size := values.get("gradpost_disk_size_bytes"):
        one.disk = values.get("gradpost_disk_free_bytes", 0.0), size


async def _time_health(http: httpx.AsyncClient, one: Reached) -> None:
    await _get(http, one.address + HEALTH)  # opens the connection
    sent = time.time()
    began = time.perf_counter()
    response = await _get(http, one.address + HEALTH)
    one.round_trip_seconds = time.perf_counter() - began
    if date := response.headers.get("date"):
        # It has whole seconds, so that the time is half a second later on average.
        one.clock_seconds = parsedate_to_datetime(date).timestamp() + 0.5 - (sent + one.round_trip_seconds / 2)


async def _measure(clients: Sequence[httpx.AsyncClient], one: Reached, *, with_speed: bool) -> None:
    """By the first one that gets through; trainers have only that."""
    body = memoryview(bytes(PILOT_BYTES))
    for http in clients:
        try:
            _, one.http_version = await _push(http, one.address, body)
            break
        except httpx.TransportError:
            if http is clients[-1]:
                raise
    if not with_speed:
        return
    seconds, _ = await _push(http, one.address, body)
    num_bytes = _bytes_of_a_second(seconds)
    seconds, _ = await _push(http, one.address, memoryview(bytes(num_bytes)))
    one.speed_to = num_bytes / seconds
    num_bytes = _bytes_of_a_second(await _pull(http, one.address, PILOT_BYTES))
    one.speed_from = num_bytes / await _pull(http, one.address, num_bytes)


def _bytes_of_a_second(pilot_seconds: float) -> int:
    """As many as take about a second, or all of them.

    >>> _bytes_of_a_second(0.001), _bytes_of_a_second(0.5), _bytes_of_a_second(10)
    (8000000, 131072, 65536)
    """
    return max(PILOT_BYTES, min(SPEED_BYTES, int(PILOT_BYTES / pilot_seconds)))


async def _push(http: httpx.AsyncClient, address: str, body: memoryview) -> tuple[float, str]:
    began = time.perf_counter()
    async with asyncio.timeout(SPEED_SECONDS):
        response = await http.post(address + SPEED, extensions={BODY_EXTENSION: (body,)})
    seconds = time.perf_counter() - began
    raise_for_problem(response)
    counted = json.loads(response.content)
    if counted["num_bytes"] != len(body):
        raise ValueError(f"{counted['num_bytes']} bytes arrived of {len(body)}")
    return seconds, f"HTTP/{counted['http_version']}"


async def _pull(http: httpx.AsyncClient, address: str, num_bytes: int) -> float:
    began = time.perf_counter()
    async with asyncio.timeout(SPEED_SECONDS):
        response = await http.get(f"{address}{SPEED}?num_bytes={num_bytes}")
    raise_for_problem(response)
    if len(response.content) != num_bytes:
        raise ValueError(f"{len(response.content)} bytes came of {num_bytes}")
    return time.perf_counter() - began


async def _get(http: httpx.AsyncClient, url: str) -> httpx.Response:
    response = await http.get(url)
    raise_for_problem(response)
    return response
