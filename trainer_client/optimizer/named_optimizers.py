"""`wrap_optimizers`: several optimizers in one run, such as the two of a GAN."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel

from ..engines.combined_optimizer import CombinedOptimizer
from ..session.script import hide_frames
from ..session.session import Session
from .remote_optimizer import RemoteOptimizer
from .wrapped_optimizer import WrappingOptimizer


class NamedOptimizer(WrappingOptimizer):
    """One of several optimizers of a run. Its `step` is a step of the run with the gradients of its own parameters.

    Made by `wrap_optimizers`. Hyperparameters, schedulers, `zero_grad`, `state_dict` and `load_state_dict` are its own,
    too. The rest of the run (`round`, `epochs`, `synchronize`, …) is that of `remote`, the RemoteOptimizer that all of
    them share. `remote.epochs` expects one step of each optimizer with a batch. A restart between these steps repeats
    the batch.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler calls `step`, which refuses it

    def __init__(self, name: str, wrapped: Optimizer, remote: RemoteOptimizer) -> None:
        """`wrapped` is the member of this name of the CombinedOptimizer that `remote` wraps."""
        super().__init__(wrapped)
        self.name = name
        self.remote = remote
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        parameters = remote._work.model.parameters.items()
        self._parameters = {name: parameter for name, parameter in parameters if id(parameter) in own}
        state = None if remote._remote_state is None else remote._remote_state.of_member(name)
        self._take_over(state, lambda: remote.session.is_open)

    @property
    def session(self) -> Session:
        """The session of this trainer."""
        return self.remote.session

    @torch.no_grad()
    @hide_frames
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step as `RemoteOptimizer.step` does, as if the parameters of the other optimizers had no gradients.

        All trainers step the same optimizer at the same time. Raises BadModel for a GradScaler, and the errors of
        `RemoteOptimizer.step`.
        """
        if getattr(self, "found_inf", None) is not None:
            raise BadModel("a GradScaler needs a run with one optimizer. Use bfloat16, whose losses need no scaling")
        self.session.check_open("step()")
        loss = self._begin_step(closure)
        self.remote._take_step(self._parameters)
        return loss

    def __repr__(self) -> str:
        return f"NamedOptimizer({self.name!r}, {self.remote!r})"


@hide_frames
def wrap_optimizers(
    *,
    model: nn.Module | None = None,
    buffers: Mapping[str, str] | None = None,
    session: Session | None = None,
    **optimizers: Optimizer,
) -> tuple[NamedOptimizer, ...]:
    """Join the run with several optimizers, and return what the script uses in their place, in the same order.

        optimizer_d, optimizer_g = gradpost.wrap_optimizers(D=optimizer_d, G=optimizer_g)

    The optimizers may be of different classes. A step of one does not change the parameters of another. Blocks as
    `RemoteOptimizer` does, and raises the same errors.

    Args:
        model: as of `RemoteOptimizer`: with it buffers take part, such as `nn.ModuleDict({"D": net_d, "G": net_g})`.
            Without it the names of parameters begin with that of their optimizer: `D.0.weight`.
        buffers, session: as of `RemoteOptimizer`. Settings are those of `connect` or of the environment.
        optimizers: by the names that checkpoints, the inspection and `gradpost rate --optimizer` have.

    Raises BadModel also if two optimizers have the same parameter, and in asynchronous modes, with `max_delay`, local
    steps and `overlap`.
    """
    if not optimizers:
        raise BadModel(
            "wrap_optimizers needs optimizers by name, such as wrap_optimizers(D=optimizer_d, G=optimizer_g)"
        )
    remote = RemoteOptimizer(CombinedOptimizer(optimizers), model=model, buffers=buffers, session=session)
    return tuple(NamedOptimizer(name, optimizer, remote) for name, optimizer in optimizers.items())
