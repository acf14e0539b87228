"""The I/O thread: all network I/O of a trainer runs on its own event loop, beside the computation."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ps_protocol.errors import GradpostError

from .frames import drop_all_frames

T = TypeVar("T")


class IoLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves host names even while the interpreter ends.

    The default executor accepts no work then, and a script that is done must still report to the coordinator, which
    may be known by a host name. The report is all that is left, so a blocking call delays nothing else.
    """

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> list[Any]:
        """Resolve a host name as asyncio does, or by a blocking call while the interpreter ends."""
        try:
            return await super().getaddrinfo(host, port, **options)
        except RuntimeError:
            return list(socket.getaddrinfo(host, port, **options))


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel these tasks until all have ended. A task may lose a cancellation that meets its result.

    `asyncio.wait_for` does so before Python 3.12.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=1)


async def _end_all_tasks() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # a task may begin meanwhile
        await end_tasks(tasks)


class IoThread:
    """An event loop on a daemon thread. Closing it cancels the remaining tasks, and waits for the thread to end."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = IoLoop()
        self._thread = threading.Thread(target=self._serve, name="gradpost io", daemon=True)
        self._thread.start()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked from the one with this thread, so that nothing can run on it."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: a fork copies the memory of a process, and none of its threads."""
        if self.is_inherited:
            raise RuntimeError(
                f"process {self._pid} joined the run, and process {os.getpid()}, which was forked from it, has none of "
                "its connections: call connect() in the child process that trains, and not before it is forked"
            )

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_end_all_tasks())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, and return immediately. Raises RuntimeError in a forked child."""
        if self.is_inherited:
            coroutine.close()
            self.check_process()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result; an interrupt of the caller cancels it."""
        return self.wait(self.start(coroutine))

    def wait(self, future: Future[T], timeout: float = -1) -> T:
        """Wait for a started coroutine; an interrupt of the caller or TimeoutError cancels it.

        The caller waits for a lock of its own. An interrupt within `Future.result` may leave the future's lock held or
        not held, so that the loop waits for it forever, or RuntimeError takes the place of KeyboardInterrupt.
        """
        ended = threading.Lock()
        ended.acquire()
        try:
            self.loop.call_soon_threadsafe(future.add_done_callback, lambda _: ended.release())
            if not ended.acquire(timeout=timeout):
                raise TimeoutError
        except BaseException:
            self.loop.call_soon_threadsafe(future.cancel)
            raise
        try:
            return future.result()
        except GradpostError as error:
            drop_all_frames(error)
            raise

    def close(self) -> None:
        """Stop the loop; safe to call twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self._wait_for_kernel()

    def _wait_for_kernel(self) -> None:
        """Wait until the kernel has ended the thread, on Linux, for at most a second.

        `join` returns earlier, while OpenSSL still holds a lock to free the thread's memory. A process that is forked
        meanwhile would wait for that lock forever.
        """
        task = Path(f"/proc/self/task/{self._thread.native_id}")
        deadline = time.monotonic() + 1
        while task.exists() and time.monotonic() < deadline:  # there is no event for it
            time.sleep(0.0005)
