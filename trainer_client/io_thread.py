"""The I/O thread: all network I/O of a trainer runs on its own event loop, beside the computation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ps_protocol.errors import GradpostError

T = TypeVar("T")


class IoThread:
    """An event loop on a daemon thread. Closing it cancels what is left and waits for the thread to end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="gradpost io", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for its result; an interrupt of the caller cancels it."""
        return self.wait(self.start(coroutine))

    def wait(self, future: Future[T]) -> T:
        """Wait for what was started; an interrupt of the caller cancels it.

        A GradpostError comes without its way through the client: it names what happened, and forty lines of
        coroutines above it would only bury the name.
        """
        try:
            return future.result()
        except GradpostError as error:
            raise error.with_traceback(None) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop; safe to call twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
