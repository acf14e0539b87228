"""Steps of the process that leads a host: what all of its processes have computed goes to the run as one gradient.

    step t:  bucket by bucket, last layers first ──► sum of all processes', here ──► mean ──► the trainer's step
             and then the parameters, to the others

The trainer's step is that of any trainer, whatever the strategy and the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from ..buffer_averages import BufferAverages
from ..collectives import choose_device
from ..flat_buckets import FlatBucket, FlatGradients, cut_buckets
from ..model_tensors import check_alike
from ..ring.steps import RingSteps
from ..session import Session
from ..steps import Steps
from .host import Host
from .values import Values


class LeaderSteps:
    """The steps of the process that leads: the mean of the host's gradients is its contribution to the run."""

    def __init__(
        self,
        session: Session,
        host: Host,
        parameters: Mapping[str, Tensor],
        averages: BufferAverages,
        stored: Mapping[str, Tensor],
        model: Mapping[str, str],
        start: Callable[[], Steps | RingSteps],
    ) -> None:
        """`start` declares the model, and takes the values that the run begins with. Blocks for the other processes."""
        self._host = host
        self._client = session.client
        self._parameters = parameters
        self._num_handed_on = 0  # buckets of the next step, whose mean is on its way already
        device = choose_device(parameters)
        with host.reporting_failure():
            for process, line in enumerate(host.receive("model"), 1):
                check_alike(model, line["model"], process)
            self._steps = start()
            bucket_bytes = self._client.settings.chosen_bucket_bytes
            host.send(
                "started",
                round=self._steps.version,
                nonfinite=self._client.nonfinite,
                bucket_bytes=bucket_bytes,
                outcomes=self._client.outcomes,
            )
            host.open_group(device)
            Values({**parameters, **averages.means, **stored}, device).send(host.collectives)
            host.finish()
        self._values = Values({**parameters, **averages.means}, device)
        self._gradients = FlatGradients(parameters, cut_buckets(parameters, bucket_bytes, device), self._send)

    @property
    def begun(self) -> Round:
        """The newest one."""
        return self._steps.begun

    @property
    def num_rollbacks(self) -> int:
        """How many rollbacks this trainer has followed."""
        return self._steps.num_rollbacks

    @property
    def version(self) -> Round:
        """The step that is in the parameters."""
        return self._steps.version

    def refresh_parameters(self) -> None:
        """See Steps."""
        self._steps.refresh_parameters()
        self._values.check()

    def replace_values(self, names: Collection[str]) -> None:
        """See Steps. The values of this process count for the host."""
        self._steps.replace_values(names)

    # ------------------------------------------------------------------ gradients

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a flat gradient of the next step, before that begins. Does not block.

        Buckets that all processes have reduced meanwhile go on to the run.
        """
        self._gradients.add(name, gradient)
        while self._host.collectives.has_ended(self._num_handed_on):
            bucket = self._gradients.buckets[self._num_handed_on]
            self._num_handed_on += 1
            for filled, mean in self._mean_of(bucket).items():
                if filled in bucket.filled:
                    self._steps.add(filled, mean)

    def _send(self, bucket: FlatBucket) -> None:
        self._host.collectives.reduce(bucket.flat)

    def _mean_of(self, bucket: FlatBucket) -> dict[str, Tensor]:
        bucket.flat.mul_(1 / self._host.place.num_processes)
        return bucket.parts

    def forget_gradients(self) -> None:
        """See Steps. What has left cannot be taken back, and then nor can this step be taken again."""
        self._gradients.forget()
        self._steps.forget_gradients()

    def begin(self, gradients: Mapping[str, Tensor], numbers: list[HyperParameters], *, is_finite: bool) -> None:
        """Begin the next step, with all flat gradients of this process. Blocks for the host's other processes.

        A parameter has no gradient if it has none in any process. If those of one have overflowed, the host takes part
        with nothing.
        """
        with self._host.reporting_failure():
            try:
                self._gradients.check(gradients)
                self._gradients.send_rest(gradients)
                lines = self._host.receive("step", self._client.joined.round_timeout_seconds)
                self._host.finish()
                means = self._all_means()
            finally:
                self._gradients.begin()
                self._num_handed_on = 0
            is_finite = is_finite and all(line["is_finite"] for line in lines)
            names = list(self._parameters)
            absent = {*names} - gradients.keys()
            for line in lines:
                absent.intersection_update(names[index] for index in line["absent"])
            present = {name: means[name] for name in names if name not in absent} if is_finite else {}
            self._steps.begin(present, numbers, is_finite=is_finite)

    def _all_means(self) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for index, bucket in enumerate(self._gradients.buckets):
            means.update(bucket.parts if index < self._num_handed_on else self._mean_of(bucket))
        return means

    # ------------------------------------------------------------------ the step

    def finish_due_step(self) -> None:
        """See Steps. The other processes get the parameters, or what went wrong."""
        with self._host.reporting_failure():
            self._steps.finish_due_step()
            self._send_result()

    def take(self, names: Collection[str] | None = None) -> bool:
        """Wait for the newest step's parameters. Without `max_delay` there is nothing to wait for."""
        if not self._client.joined.consistency.max_delay:
            return False
        with self._host.reporting_failure():
            self._host.receive("synchronize", self._client.joined.round_timeout_seconds)
            is_rolled_back = self._steps.take(names)
            self._send_result()
        return is_rolled_back

    def _send_result(self) -> None:
        self._host.send(
            "result",
            round=self._steps.version,
            begun=self._steps.begun,
            grad_norm=self._client.grad_norm,
            outcomes=self._client.outcomes,
        )
        self._values.send(self._host.collectives)
        self._host.finish()
