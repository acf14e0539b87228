"""The one thread of a process on which tensor work runs, so that the event loop never does."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from .logs import get_logger

P = ParamSpec("P")
R = TypeVar("R")

log = get_logger()


class ComputeExecutor:
    """Runs jobs one after another, in the order in which they were submitted.

    So a job owns what it touches while it runs, without a lock, as long as only jobs touch it. Jobs must not wait
    for the event loop. `num_jobs` may feed a gauge: `gauge.set_function(lambda: executor.num_jobs)`.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._num_jobs = 0

    def __repr__(self) -> str:
        return f"<ComputeExecutor [{self._num_jobs} jobs]>"

    @property
    def num_jobs(self) -> int:
        """Jobs that were submitted and are not done, the running one included."""
        return self._num_jobs

    async def run(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a job and wait for its result or exception.

        The job belongs to the state that it changes, not to the request that asked for it: when the waiting task
        is cancelled, the job still runs to its end, and an exception of it is logged. Raises RuntimeError once
        the executor is closed.
        """
        context = contextvars.copy_context()  # so that what the job logs names the request
        job = asyncio.get_running_loop().run_in_executor(self._pool, lambda: context.run(fn, *args, **kwargs))
        self._num_jobs += 1
        job.add_done_callback(self._job_done)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            job.add_done_callback(_log_failure)
            raise

    def close(self) -> None:
        """Refuse further jobs, and block until those that were submitted are done."""
        self._pool.shutdown()

    def _job_done(self, _: asyncio.Future[R]) -> None:
        self._num_jobs -= 1


def _log_failure(job: asyncio.Future[R]) -> None:
    if not job.cancelled() and (error := job.exception()):
        log.error("a job failed that nobody waits for any more", exc_info=error)
