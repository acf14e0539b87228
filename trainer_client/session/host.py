"""The processes of a host: their connections, their messages, and the process group of their collectives.

Process 0 leads: it listens on loopback, and each of the others has one connection to it. They wait on the I/O loop,
where the end of a connection, a long silence or the run's failure ends the wait. Collectives do not report
which process is missing, and NCCL's do not even notice; the end of its connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import torch

from ps_protocol.errors import BadModel, Ended, GradpostError, error_from_problem
from ps_protocol.messages import TrainerJoined
from ps_protocol.retry import heartbeat_period

from ..client.run_client import RunClient
from .collectives import Collectives, make_group, run_aside
from .io_thread import IoThread
from .rendezvous import START_SECONDS, HostPlace, Rendezvous

T = TypeVar("T")
Line = dict[str, Any]

LOOPBACK = "127.0.0.1"
MAX_LINE_BYTES = 16 * 1024 * 1024
HELLO_SECONDS = 5.0
PAUSE_SECONDS = 0.2
LOG_SECONDS = 10.0  # a longer wait is logged
NEWS_SECONDS = 5.0  # from the break of a group's connection to the end of the process that broke it
CLOSE_SECONDS = 1.0


class Host:
    """The processes of this host, which make the same calls in the same order, and block for each other."""

    def __init__(self, place: HostPlace, client: RunClient, io: IoThread) -> None:
        self.place = place
        self.is_leader = place.process == 0
        self.collectives: Collectives
        self._client = client
        self._io = io
        self._peers: dict[int, Peer] = {}
        self._all_here = asyncio.Event()
        self._joined: TrainerJoined | None = None
        self._rendezvous: Rendezvous
        self._address = ""
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        place = self.place
        return f"<Host [process {place.process} of {place.num_processes} | {[*self._peers.values()]}]>"

    # ------------------------------------------------------------------ life, on the I/O loop

    async def join(self) -> TrainerJoined:
        """Join the run in process 0, or wait until process 0 has. Raises the errors of `RunClient.join`."""
        try:
            self._rendezvous = await run_aside(lambda: Rendezvous(self.place))
            joined = await (self._lead() if self.is_leader else self._follow())
        except RuntimeError as error:  # torchrun's store
            raise Ended(
                f"the store of torchrun did not answer: {str(error).partition(chr(10))[0]}", code="host_broken"
            ) from error
        self._joined = joined
        for peer in self._peers.values():
            self._send_joined(peer)
        self._watching = asyncio.create_task(self._watch(joined.lease_seconds), name="host")
        return joined

    async def _lead(self) -> TrainerJoined:
        self._server = await asyncio.start_server(self._welcome, LOOPBACK, 0, limit=MAX_LINE_BYTES)
        self._address = f"{self._server.sockets[0].getsockname()[1]}:{secrets.token_hex(16)}"
        await run_aside(lambda: self._rendezvous.publish(self._address))
        try:
            return await self._client.join()
        except GradpostError as error:
            self._send_to_all("failure", problem=error.to_problem())
            await self.leave("failed", str(error))
            raise

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = json.loads(await reader.readline())
            process, secret = int(hello["process"]), str(hello["secret"])
        except (OSError, ValueError, LookupError, TypeError, TimeoutError):
            writer.close()
            return
        if (
            not hmac.compare_digest(secret.encode(), self._address.partition(":")[2].encode())
            or process in self._peers
            or process not in range(1, self.place.num_processes)
        ):
            writer.close()
            return
        peer = self._peers[process] = Peer(process, reader, writer, self._client.coordinator.fail)
        peer.send("welcome")
        self._send_joined(peer)
        if len(self._peers) == self.place.num_processes - 1:
            self._all_here.set()

    def _send_joined(self, peer: Peer) -> None:
        if self.is_leader and self._joined is not None:
            peer.send("joined", joined=self._joined.model_dump(mode="json"))

    async def _follow(self) -> TrainerJoined:
        self._peers[0] = leader = await self._find_leader()
        self._all_here.set()
        joined = TrainerJoined.model_validate((await leader.receive("joined"))["joined"])
        self._client.coordinator.adopt_place(joined, self.place.process)
        return joined

    async def _find_leader(self) -> Peer:
        loop = asyncio.get_running_loop()
        begun, was_said = loop.time(), False
        while (waited := loop.time() - begun) < START_SECONDS:
            self._address = await run_aside(self._rendezvous.look_up)
            if self._address:
                with contextlib.suppress(
                    OSError, ValueError, TimeoutError
                ):  # the address may be that of an earlier incarnation
                    async with asyncio.timeout(HELLO_SECONDS):
                        return await self._connect(*self._address.split(":"))
            if waited > LOG_SECONDS and not was_said:
                self._client.log.info("waiting for process 0 of this host")
                was_said = True
            await asyncio.sleep(PAUSE_SECONDS)
        raise Ended(f"process 0 of this host has not called connect() for {START_SECONDS:g} s", code="host_broken")

    async def _connect(self, port: str, secret: str) -> Peer:
        """Connect to process 0. Raises OSError, ValueError or TimeoutError if another process listens there."""
        reader, writer = await asyncio.open_connection(LOOPBACK, int(port), limit=MAX_LINE_BYTES)
        try:
            writer.write(encode("hello", process=self.place.process, secret=secret))
            if await reader.readline() != encode("welcome"):
                raise ValueError("another process listens there")
        except BaseException:
            writer.close()
            raise
        return Peer(0, reader, writer, self._client.coordinator.fail)

    async def _watch(self, lease_seconds: float) -> None:
        """Send signs of life, and fail when a process is silent for a lease. Counts periods of this process only."""
        period = heartbeat_period(lease_seconds)
        limit = math.ceil(lease_seconds / period)
        while True:
            await asyncio.sleep(period)
            for peer in [peer for peer in self._peers.values() if not peer.left.is_set()]:
                if peer.ping() > limit:
                    text = f"process {peer.process} of this host has sent nothing for {lease_seconds:g} s"
                    self._client.coordinator.fail(
                        Ended(f"{text}: it is stopped, or too busy to run its other threads", code="host_broken")
                    )

    async def leave(self, outcome: str, reason: str) -> None:
        """Report the outcome of this process's script to the others, and close the connections.

        If it is done, process 0 waits for processes that have not connected yet.
        """
        if self.is_leader and outcome == "done":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._client.settings.retry_seconds):
                    await self._all_here.wait()
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            self._server.close()
        self._send_to_all("left", outcome=outcome, reason=reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):  # a process that is stopped does not read
                await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    def _send_to_all(self, kind: str, **facts: Any) -> None:
        for peer in self._peers.values():
            peer.send(kind, **facts)

    # ------------------------------------------------------------------ messages

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message to all connected processes. Does not wait."""
        self._io.loop.call_soon_threadsafe(lambda: self._send_to_all(kind, **facts))

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report an error of this block to the other processes."""
        try:
            yield
        except BaseException as error:
            reported = error if isinstance(error, GradpostError) else Ended(f"process 0 of this host: {error!r}")
            self.send("failure", problem=reported.to_problem())
            raise

    def receive(self, kind: str, patience: float | None = None) -> list[Line]:
        """Receive the next message of all connected processes, in the order of processes.

        Raises the error that ended the run, the failure that another process reports, Ended, and BadModel for another
        kind.
        """
        return self._run(self._receive_all(kind, patience))

    async def _receive_all(self, kind: str, patience: float | None) -> list[Line]:
        if not self._all_here.is_set():
            missing = self.place.num_processes - 1 - len(self._peers)
            await self._wait(self._all_here.wait(), START_SECONDS, f"{missing} other processes of this host", kind)
        return [
            await self._wait(peer.receive(kind), patience, f"process {process} of this host", kind)
            for process, peer in sorted(self._peers.items())
        ]

    async def _wait(self, work: Coroutine[Any, Any, T], patience: float | None, peers: str, kind: str) -> T:
        logging = asyncio.get_running_loop().call_later(LOG_SECONDS, self._log_wait, peers, kind)
        try:
            async with asyncio.timeout(patience):
                return await work
        except TimeoutError:
            text = f"no {kind!r} message from {peers} within {patience:g} s. Check their logs"
            raise Ended(text, code="host_broken") from None
        finally:
            logging.cancel()

    def _log_wait(self, peers: str, kind: str) -> None:
        if self.is_leader:  # the others wait for its waits
            self._client.log.info(f"waiting for {peers} ({kind})")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._io.run(self._client.coordinator.guard(work))

    # ------------------------------------------------------------------ the group

    def open_group(self, device: torch.device) -> None:
        """Connect with all others for collectives of tensors on this device."""
        place = self.place

        def make() -> Any:
            store = self._rendezvous.store_for(self._address)
            return make_group(store, place.process, place.num_processes, device, LOOPBACK)

        self.collectives = Collectives(self._run(self._with_news(run_aside(make))))
        self._client.at_leave.append(self.collectives.close)

    def finish(self) -> None:
        """Wait for all collectives that all processes have begun. Raises the errors of `receive`."""
        self._run(self._with_news(self.collectives.finish()))
        self.collectives.release()

    def finish_with_leader(self) -> None:
        """Wait for all collectives that were begun; raises Ended if process 0 has left."""
        self._run(self._with_news(self._finish_or_give_up(self._peers[0])))
        self.collectives.release()

    async def _finish_or_give_up(self, leader: Peer) -> None:
        finish, left = asyncio.ensure_future(self.collectives.finish()), asyncio.ensure_future(leader.left.wait())
        try:
            await asyncio.wait({finish, left}, return_when=asyncio.FIRST_COMPLETED)
            if not finish.done():
                raise leader.left_early_error()
            finish.result()
        finally:
            finish.cancel()
            left.cancel()

    async def _with_news(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except RuntimeError as error:
            await asyncio.sleep(NEWS_SECONDS)  # unless the end of a process ends this wait
            reason = str(error).partition("\n")[0]
            raise Ended(
                f"the processes of this host cannot reach each other any more: {reason}", code="host_broken"
            ) from error


class Peer:
    """Another process of this host. Lives on the I/O loop."""

    def __init__(
        self,
        process: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_failure: Callable[[GradpostError], None],
    ) -> None:
        """Listen on a connection; `on_failure` is called with an error that makes further waits useless."""
        self.process = process
        self._silent_periods = 0  # number of pings since the last message
        self.left = asyncio.Event()  # its script has ended, and reported that
        self._reader = reader
        self._writer = writer
        self._on_failure = on_failure
        self._inbox: asyncio.Queue[Line] = asyncio.Queue()
        self._unread: GradpostError | None = None  # a failure that was not received yet
        self._listening = asyncio.create_task(self._listen(), name=f"process {process}")

    def __repr__(self) -> str:
        return f"<Peer [process {self.process} | {self._inbox.qsize()} messages | silent {self._silent_periods}]>"

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message, unless the process has gone. Does not wait."""
        if not self._writer.is_closing():
            self._writer.write(encode(kind, **facts))

    def ping(self) -> int:
        """Send a sign of life, and return the number of periods since the process's last message."""
        self.send("alive")
        self._silent_periods += 1
        return self._silent_periods

    async def receive(self, kind: str) -> Line:
        """Receive the process's next message, of this kind. Raises its reported failure, Ended, BadModel.

        A cancelled wait leaves the message in the inbox.
        """
        line = await self._inbox.get()
        if line["kind"] == "failure":
            self._unread = None
            raise error_from_problem(line["problem"])
        if line["kind"] == "left":
            self._inbox.put_nowait(line)
            raise self.left_early_error()
        if line["kind"] != kind:
            raise BadModel(
                f"process {self.process} of this host has called another method of its optimizer than this process",
                expected=kind,
                actual=line["kind"],
            )
        return line

    def left_early_error(self) -> Ended:
        """Return the error for a process that still needs this one."""
        return Ended(f"process {self.process} of this host was done before the others", code="host_broken")

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the latter: not JSON, or far too long
            while text := await self._reader.readline():
                self._silent_periods = 0
                self._receive(json.loads(text))
        if not self.left.is_set():
            error = Ended(f"process {self.process} of this host has ended", code="host_broken")
            self._on_failure(error)
            self._inbox.put_nowait({"kind": "failure", "problem": error.to_problem()})

    def _receive(self, line: Line) -> None:
        if line["kind"] == "alive":
            return
        if line["kind"] == "left":
            self.left.set()
            if line["outcome"] != "done":
                error = Ended(f"process {self.process} of this host has failed: {line['reason']}", code="host_broken")
                self._on_failure(self._unread or error)
        if line["kind"] == "failure":
            self._unread = error_from_problem(line["problem"])
            if isinstance(self._unread, Ended):
                self._on_failure(self._unread)
        self._inbox.put_nowait(line)

    async def close(self) -> None:
        """Send the queued messages, and close the connection."""
        self._listening.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def encode(kind: str, **facts: Any) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps({"kind": kind, **facts}, default=str).encode() + b"\n"
