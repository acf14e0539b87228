"""The jobs of a process on tensors, one at a time, on a thread that keeps large ones off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from .logs import get_logger

P = ParamSpec("P")
R = TypeVar("R")

log = get_logger()


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    waiter: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class ComputeExecutor:
    """An executor that runs jobs one after another, in the order of their submission.

    State that only jobs access needs no lock. Jobs must not wait for the event loop.

    Waking the thread, and the loop again, costs more than stepping a small block. So the jobs of one turn of the loop
    go to the thread together, and the loop resolves all finished jobs when it is woken.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._submitted: list[_Job] = []  # in this turn of the loop
        self._done: deque[_Job] = deque()
        self._loop_is_called = False
        self.num_jobs = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ComputeExecutor [{self.num_jobs} jobs]>"

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a job and wait for its result or exception.

        If the waiting task is cancelled, the job still runs to its end, and its exception is logged. Raises
        RuntimeError once the executor is closed.
        """
        if self._is_closed:
            raise RuntimeError("the compute thread has been closed")
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()  # so that log lines of the job name the request
        waiter: asyncio.Future[R] = loop.create_future()
        self.num_jobs += 1
        if not self._submitted:
            loop.call_soon(self._start)
        self._submitted.append(_Job(partial(context.run, fn, *args, **kwargs), waiter))
        return await waiter

    async def run_at_once(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a job that takes less time than waking the thread: on the loop, unless another job is unfinished.

        Raises the errors of `run`.
        """
        if self.num_jobs or self._is_closed:
            return await self.run(fn, *args, **kwargs)
        return fn(*args, **kwargs)

    def close(self) -> None:
        """Refuse further jobs, and block until the submitted ones are done."""
        self._is_closed = True
        self._start()
        self._pool.shutdown()

    def _start(self) -> None:
        if self._submitted:
            self._pool.submit(self._run_all, self._submitted)
            self._submitted = []

    def _run_all(self, jobs: list[_Job]) -> None:
        """Run jobs. Called on the thread."""
        for job in jobs:
            try:
                job.result = job.call()
            except StopIteration as error:  # futures refuse it
                job.error = RuntimeError(f"a job raised {error!r}")
            except BaseException as error:  # raised in the waiting task
                job.error = error
            self._done.append(job)
            if not self._loop_is_called:
                self._loop_is_called = True
                with contextlib.suppress(RuntimeError):  # the loop has ended, and no task waits
                    job.waiter.get_loop().call_soon_threadsafe(self._resolve_all)

    def _resolve_all(self) -> None:
        self._loop_is_called = False  # first, so that later jobs wake the loop again
        while self._done:
            job = self._done.popleft()
            self.num_jobs -= 1
            if job.waiter.cancelled():
                if job.error is not None:
                    log.error("a job failed after its request was cancelled", exc_info=job.error)
            elif job.error is None:
                job.waiter.set_result(job.result)
            else:
                job.waiter.set_exception(job.error)
