from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from services.runtime.compute import ComputeExecutor


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    executor = ComputeExecutor()
    yield executor
    executor.close()


async def test_job_outlives_its_cancelled_request_even_if_it_still_queues(executor: ComputeExecutor) -> None:
    gate = threading.Event()
    done: list[str] = []
    running = asyncio.create_task(executor.run(gate.wait, 5))
    queued = asyncio.create_task(executor.run(done.append, "queued"))
    await asyncio.sleep(0)
    for task in (running, queued):
        task.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    assert queued.cancelled()
    assert (done, executor.num_jobs) == ([], 2)
    gate.set()
    await executor.run(lambda: None)
    assert (done, executor.num_jobs) == (["queued"], 0)


async def test_a_quick_job_runs_on_the_loop_after_the_earlier_jobs(executor: ComputeExecutor) -> None:
    here = threading.get_ident()
    assert await executor.run_at_once(threading.get_ident) == here
    gate, order = threading.Event(), list[str]()
    earlier = asyncio.create_task(executor.run(lambda: gate.wait(10) and order.append("earlier")))
    await asyncio.sleep(0)
    quick = asyncio.create_task(executor.run_at_once(lambda: order.append("quick")))
    await asyncio.sleep(0)
    assert not order
    gate.set()
    await asyncio.gather(earlier, quick)
    assert order == ["earlier", "quick"]
