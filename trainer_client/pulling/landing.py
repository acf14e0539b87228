"""Where pulls land: in the parameters' own memory if that can be, else beside it, to be copied from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ps_protocol.errors import BadModel
from ps_protocol.plan import SlicePlan

from ..device_copies import ParameterCopies, host_memory, is_away
from ..tensors import TORCH_DTYPES, lands_directly, wire_dtype


class Landing:
    """Sets of host tensors by parameter name, one for each step that may be on its way, in the dtype on the wire.

    They are the parameters' own memory if nobody computes with these meanwhile. A difference is added to what was
    pulled, and not to what a script may have made of that: then they lie apart, too.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], plan: SlicePlan, max_delay: int, *, are_awaited: bool = False
    ) -> None:
        """`are_awaited`: whoever computes with a parameter takes its new value first."""
        self._parameters = parameters
        self._copies = ParameterCopies(are_awaited=are_awaited)
        self._plan = plan
        self._dtypes = {name: TORCH_DTYPES[plan.pulled(name)] for name in parameters}
        self._is_apart = max_delay > 0 or plan.wire.pulls_deltas
        self.sets: list[dict[str, Tensor]] = (
            [{name: host_memory(p, self._dtypes[name]) for name, p in parameters.items()} for _ in range(max_delay + 1)]
            if self._is_apart
            else [landing_of(parameters, self._dtypes)]
        )
        self._note_memory()

    def _note_memory(self) -> None:
        self._memory = {name: _memory_of(parameter) for name, parameter in self._parameters.items()}

    def has_moved(self) -> bool:
        """Whether a script has given a parameter other memory, as `module.to()` does; then `sets` are new.

        Raises BadModel if it has become another parameter.
        """
        if all(_memory_of(parameter) == self._memory[name] for name, parameter in self._parameters.items()):
            return False
        for name, parameter in self._parameters.items():
            spec = self._plan.parameter[name]
            if (tuple(parameter.shape), wire_dtype(name, parameter)) != (spec.shape, spec.dtype):
                raise BadModel(
                    f"parameter {name!r} has become another one; the slice plan is made once, when the run starts",
                    expected=f"{spec.dtype} {list(spec.shape)}",
                    actual=f"{parameter.dtype} {list(parameter.shape)}",
                )
        if not self._is_apart:
            self.sets = [landing_of(self._parameters, self._dtypes)]
        self._note_memory()
        return True

    def begin(self) -> None:
        """A step has begun, and its pull will write to a set. Blocks for copies from there to a device."""
        self._copies.begin(self._parameters)

    def take(self, index: int, names: Iterable[str], *, is_noticed: bool = True) -> None:
        """What a set holds goes to these parameters.

        Unless `is_noticed` autograd does not see it: a graph that was made before may be gone through once more.
        """
        taken = {name: self._parameters[name] for name in names}
        seen = taken if is_noticed else {name: parameter.data for name, parameter in taken.items()}
        copy_landed(seen, self.sets[index], self._copies)


def landing_of(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """For each tensor where its bytes are written to, in the dtype on the wire: its own memory, or some beside it."""
    return {
        name: tensor.detach()
        if lands_directly(tensor) and tensor.dtype == dtypes[name]
        else host_memory(tensor, dtypes[name])
        for name, tensor in tensors.items()
    }


def copy_landed(tensors: Mapping[str, Tensor], landed: Mapping[str, Tensor], copies: ParameterCopies) -> None:
    """Copy what was pulled to where it could not be written directly: other devices, other memory formats."""
    written = []  # by the network
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.data_ptr() == landed[name].data_ptr():
                written.append(tensor)
            elif is_away(tensor):
                copies.copy(tensor, landed[name])
            else:
                tensor.copy_(landed[name])
    # Autograd did not see that: a second backward through the old graph must fail, as ever.
    torch.autograd.graph.increment_version(written)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
