"""Steps of the other processes of a host: gradients go to the process that leads, and parameters come from there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from ..buffer_averages import BufferAverages
from ..collectives import choose_device
from ..flat_buckets import FlatBucket, FlatGradients, cut_buckets
from ..local_steps import LocalSteps
from ..round_results import Outcomes
from ..session import Session
from .host import Host
from .values import Values


class FollowerSteps:
    """As `Steps`, of a process that has no place in the run."""

    def __init__(
        self,
        session: Session,
        host: Host,
        parameters: Mapping[str, Tensor],
        averages: BufferAverages,
        stored: Mapping[str, Tensor],
        model: Mapping[str, str],
        local: LocalSteps | None,
    ) -> None:
        """Takes the values that the run begins with. Blocks until the process that leads has them."""
        self._host = host
        self._client = session.client
        self._names = list(parameters)
        self._local = local
        self._averages = averages
        self.begun: Round = 0
        self.version: Round = 0
        self.num_rollbacks = 0  # that the process that leads has followed
        device = choose_device(parameters)
        host.send("model", model=model)
        [started] = host.receive("started")
        self._client.nonfinite = started["nonfinite"]
        self._client.outcomes = Outcomes(*started["outcomes"])
        self._client.is_declared = True
        host.open_group(device)
        self._gradients = FlatGradients(
            parameters, cut_buckets(parameters, started["bucket_bytes"], device), self._send
        )
        self._values = Values({**parameters, **averages.means, **stored}, device)
        self._write_back(started["round"])
        self.begun = self.version
        self._values = Values({**parameters, **averages.means}, device)

    def refresh_parameters(self) -> None:
        """Raise BadModel if a parameter has become another one."""
        self._values.check()

    def replace_values(self, names: Collection[str]) -> None:
        """See Steps. The values of the process that leads count, and come with the next step."""
        if self._local is not None:
            self._local.begin()

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a flat gradient of the next step, before that begins. Does not block."""
        self._gradients.add(name, gradient)

    def _send(self, bucket: FlatBucket) -> None:
        self._host.collectives.reduce(bucket.flat)

    def forget_gradients(self) -> None:
        """Give up what was added. What has left cannot be taken back, and then nor can this step be taken again."""
        self._gradients.forget()

    def begin(self, gradients: Mapping[str, Tensor], numbers: list[HyperParameters], *, is_finite: bool) -> None:
        """Send all flat gradients. Blocks for the process that leads; what the step's numbers are, it says alone."""
        self.begun += 1
        self._gradients.check(gradients)
        self._gradients.send_rest(gradients)
        absent = [index for index, name in enumerate(self._names) if name not in gradients]
        self._host.send("step", absent=absent, is_finite=is_finite)
        self._host.finish_with_leader()
        self._gradients.begin()

    def finish_due_step(self) -> None:
        """Wait for the parameters. Raises what went wrong in the process that leads."""
        self._take_result()

    def take(self, names: Collection[str] | None = None) -> bool:
        """Wait for the newest step's parameters. Without `max_delay` there is nothing to wait for."""
        if self._client.joined.consistency.max_delay:
            self._host.send("synchronize")
            self._take_result()
        return False

    def _take_result(self) -> None:
        [result] = self._host.receive("result")
        self._client.grad_norm = result["grad_norm"]
        self._client.outcomes = Outcomes(*result["outcomes"])
        self.num_rollbacks += result["begun"] < self.begun
        self.begun = result["begun"]
        self._write_back(result["round"])

    def _write_back(self, version: Round) -> None:
        self._values.receive(self._host.collectives)
        self._host.finish()
        self._values.write_back()
        self._averages.write_back()
        self.version = self._client.membership.round = version
        if self._local is not None:
            self._local.begin()
