"""The initial values of a run's shard: their upload by the elected trainer, and version 0, which they complete."""

from __future__ import annotations

import asyncio

from ps_protocol.errors import Conflict, TryAgain
from ps_protocol.fence import Fence
from ps_protocol.requests import PushAnswer

from ..shard.bodies import Body
from .context import RunContext
from .read_pushes import read_buffers, read_initial_blocks
from .schedule import Executor
from .staging import Admission


class InitialValues:
    """The upload of the initial values of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, executor: Executor) -> None:
        self._context = context
        self._executor = executor
        self._buffers = {spec.name: spec for spec in context.plan.buffers if spec.pserver == context.index}
        self._publishing = asyncio.Lock()

    def admit(self, fence: Fence) -> Admission:
        """Check an upload of initial values: round 0, from the elected trainer."""
        context, uploader = self._context, self._context.installed.uploader
        context.check_fence(fence)
        context.check_member(fence)
        if fence.round != 0 or fence.rank != uploader:
            text = f"the initial values must be uploaded by trainer {uploader}, as round 0"
            raise Conflict(text, code="stale_trainer")
        return "already_applied" if context.shard.is_initialised else "open"

    async def store(self, fence: Fence, body: Body) -> PushAnswer:
        """Store initial values and buffers; the last one makes the run readable at version 0."""
        context, shard = self._context, self._context.shard
        buffers = read_buffers(body, self._buffers)
        blocks = read_initial_blocks(body, shard.layout, skip=self._buffers)

        def store() -> None:
            if not shard.is_initialised:  # a late duplicate must not overwrite later steps
                for name, block in blocks.items():
                    shard.set_initial(name, block.tensor())
                for entry in buffers:
                    shard.set_initial_buffer(entry.name, body.view(entry))

        if self.admit(fence) == "already_applied":
            await self.publish()  # the request that stored the last value may have ended before it did this
            return PushAnswer(status="already_applied", duplicates=len(body.frame.tensors))
        context.wait_clock.stop()
        await context.compute.run(store)
        await self.publish()
        return PushAnswer(status="staged", staged=len(body.frame.tensors), complete=shard.is_initialised)

    async def publish(self) -> None:
        """Make the first version readable once every value has arrived; without blocks, immediately.

        A restored shard begins with the version that was restored.
        """
        async with self._publishing:
            if self._context.shard.is_initialised and not self._context.is_readable:
                await self._publish()
        await self._context.notify()  # even without a version, since the time-out of its readers begins again

    async def _publish(self) -> None:
        context, installed = self._context, self._context.installed
        context.check_failure()
        if context.storage is not None and (installed.restore is None or installed.source is not None):
            await self._persist()
        context.check_failure()
        await self._executor.open_reads()
        context.is_readable = True
        context.wait_clock.stop()

    async def _persist(self) -> None:
        """Write the first version as a snapshot, before a trainer can read it."""
        context = self._context
        context.writer.begin_named(context.shard.version)
        try:
            write = await context.writer.write(context.shard, context.schedule.copy_history(), context.compute)
            error = await asyncio.shield(write)
        except TryAgain as problem:
            error = OSError(problem.detail)
        if error is not None:
            await self._executor.end(context.storage_failed("write its first snapshot", error), is_failure=True)

    async def wait_until_published(self) -> None:
        """Wait for checkpoint 0, if it is being written."""
        async with self._publishing:
            pass
