from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from services.runtime.compute import ComputeExecutor
from services.runtime.logs import configure_logs


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    executor = ComputeExecutor()
    yield executor
    executor.close()


async def test_jobs_run_one_after_another_in_order(executor: ComputeExecutor) -> None:
    order: list[str] = []

    def job(name: str) -> str:
        order.append(f"{name} begins")
        time.sleep(0.01)
        order.append(f"{name} ends")
        return name

    assert await asyncio.gather(*(executor.run(job, name) for name in "abc")) == ["a", "b", "c"]
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


async def test_a_result_does_not_wait_for_the_jobs_behind_it(executor: ComputeExecutor) -> None:
    """Though all of them went to the thread together."""
    gate = threading.Event()
    first, second, third = (asyncio.create_task(executor.run(job, 5)) for job in (abs, abs, gate.wait))
    assert await asyncio.wait_for(asyncio.gather(first, second), 2) == [5, 5]
    assert not third.done()
    gate.set()
    assert await third


async def test_an_exception_that_no_future_takes_hides_nobody_elses_result(executor: ComputeExecutor) -> None:
    first, second = asyncio.create_task(executor.run(next, iter(()))), asyncio.create_task(executor.run(abs, -5))
    assert await asyncio.wait_for(second, 2) == 5
    with pytest.raises(RuntimeError, match="StopIteration"):
        await first


async def test_what_was_submitted_in_the_turn_of_the_loop_that_closes_it_is_done(executor: ComputeExecutor) -> None:
    request = asyncio.create_task(executor.run(abs, -5))
    asyncio.get_running_loop().call_soon(executor.close)
    assert await asyncio.wait_for(request, 2) == 5


async def test_jobs_do_not_run_on_the_event_loop(executor: ComputeExecutor) -> None:
    assert await executor.run(threading.get_ident) != threading.get_ident()


async def test_exception_reaches_the_caller(executor: ComputeExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 / 0)


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


async def test_failure_that_nobody_waits_for_is_logged(
    executor: ComputeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("test", "json")
    gate = threading.Event()

    def fail() -> None:
        gate.wait(5)
        raise ZeroDivisionError("in a job")

    request = asyncio.create_task(executor.run(fail))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    gate.set()
    await executor.run(lambda: None)
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: in a job" in json.loads(line)["exception"]


async def test_job_sees_the_requests_context(executor: ComputeExecutor) -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("request")
    assert await executor.run(variable.get) == "request"


async def test_close_waits_for_jobs_and_refuses_more(executor: ComputeExecutor) -> None:
    done: list[str] = []

    def job() -> None:
        time.sleep(0.02)
        done.append("job")

    request = asyncio.create_task(executor.run(job))
    await asyncio.sleep(0)
    executor.close()
    assert done == ["job"]
    await request
    with pytest.raises(RuntimeError):
        await executor.run(job)
    assert executor.num_jobs == 0


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
