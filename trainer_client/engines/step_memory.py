"""Memory of the steps on their way. With `max_delay` = k there are k + 1 sets, and step t uses set t mod (k + 1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES

from ..client.buckets import PushBuckets, make_buckets
from ..client.run_client import RunClient
from ..transport.destinations import make_destinations, make_shard_destinations
from ..transport.device_copies import host_memory
from ..transport.tensors import writable_bytes


class StepMemory:
    """One set: the memory that the gradients of a step leave from, and the memory that its parameters arrive in.

    Parameters arrive in their own memory if that has the form on the wire and the script computes nothing meanwhile.
    With `max_delay` they arrive in separate memory. So they do if pulls are deltas, because a delta is added to pulled
    values, which the script must not have changed. Rows of sparse parameters always arrive in memory of their own.
    """

    def __init__(self, client: RunClient, parameters: Mapping[str, Tensor]) -> None:
        plan = client.run.plan
        self._client = client
        self._parameter_of = {block.name: block.parameter for shard in plan.shards for block in shard}
        self._parameters = {name: each for name, each in parameters.items() if not plan.parameter[name].is_sparse}
        self._dtypes = {name: TORCH_DTYPES[plan.pulled(name)] for name in parameters}
        self._is_apart = client.joined.consistency.max_delay > 0 or plan.wire.pulls_deltas
        self.received: dict[str, Tensor] = {}  # host tensors by parameter name, in the dtype on the wire
        if self._is_apart:
            self.received = {name: host_memory(each, self._dtypes[name]) for name, each in self._parameters.items()}
        self.follow_parameters()
        self.gradients: dict[str, Tensor] = {}  # host copies of gradients on a device, by parameter name, (numel,)
        size, feedback = client.settings.chosen_bucket_bytes, client.pservers.feedback
        self.buckets = PushBuckets(make_buckets(plan, bucket_bytes=size, feedback=feedback))

    def follow_parameters(self) -> None:
        """Use the memory that the parameters have now, unless this set is separate."""
        if not self._is_apart:
            self.received = make_destinations(self._parameters, self._dtypes)
        memory = {name: writable_bytes(tensor) for name, tensor in self.received.items() if tensor.numel()}
        self.destinations = make_shard_destinations(self._client.run.plan, memory, keeps_values=True)  # by pserver

    @property
    def changed(self) -> set[str]:
        """The parameters that the newest pull has written."""
        received = (name for destination in self.destinations for name in destination.received)
        return {self._parameter_of[name] for name in received if name in self._parameter_of}  # else scales of deltas

    def write_rows(self, parameters: Mapping[str, Tensor]) -> None:
        """Write the rows that the newest pull has brought to these sparse parameters."""
        for destination in self.destinations:
            for rows in destination.rows.values():
                if rows.parameter in parameters:
                    rows.write_to(parameters[rows.parameter])

    def read_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the rows that the newest pull has brought, by sparse parameter: see `RowsDestination.read`."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for destination in self.destinations:
            for rows in destination.rows.values():
                if (arrived := rows.read()) is not None:
                    found.setdefault(rows.parameter, []).append(arrived)
        return {name: (torch.cat([i for i, _ in its]), torch.cat([v for _, v in its])) for name, its in found.items()}

    def forget_base(self) -> None:
        """Pull all blocks the next time, because the received values may have changed."""
        for destination in self.destinations:
            destination.base = None
