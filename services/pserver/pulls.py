"""What each trainer was given, so that the staleness of its gradients can be measured and compensated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.consistency import oldest_start
from ps_protocol.errors import StaleRound
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Rank, Round


@dataclass(frozen=True, slots=True)
class Pull:
    """The state of the shard that was handed out."""

    versions: Mapping[str, int]  # of each block: how many updates it had had
    values: Tensor | None = None  # flat float32 copy of the shard, only where it is needed (DC-ASGD)


class Pulls:
    """The pulls of every trainer, by the step that it had completed; what is too old to be computed on is forgotten.

    With DC-ASGD each holds a copy of the shard: (max_delay + 2) float32 shards a trainer at most, besides those that
    queued updates were computed on.

    A pserver that has come back does not know what trainers have pulled from its earlier life: until they pull again,
    that counts as `restored`, the state in which it came back.
    """

    def __init__(self, max_delay: int, restored: Pull | None = None) -> None:
        self._max_delay = max_delay
        self._restored = restored
        self._pulls: dict[Rank, dict[Round, Pull]] = {}

    def __repr__(self) -> str:
        kept = ", ".join(f"trainer {rank}: {sorted(pulls)}" for rank, pulls in sorted(self._pulls.items()))
        return f"<Pulls [{kept}]>"

    def record_pull(self, rank: Rank, step: Round, pull: Pull) -> None:
        """A get after `step` is answered; asked again, the newer answer counts."""
        pulls = self._pulls.setdefault(rank, {})
        pulls[step] = pull
        # The oldest that the next pushed step may still name.
        oldest = oldest_start(step + 1, self._max_delay)
        for old in [known for known in pulls if known < oldest]:
            del pulls[old]

    def find_pull(self, rank: Rank, step: Round) -> Pull:
        """What the trainer got after `step`; raises StaleRound if it got nothing then."""
        known = self._pulls.get(rank, {})
        pull = known.get(step)
        if pull is None and self._restored is not None and step < min(known, default=step + 1):
            return self._restored
        if pull is None:
            raise StaleRound(
                f"trainer {rank} got no parameters after its step {step}, or newer ones since",
                current=sorted(self._pulls.get(rank, {})),
            )
        return pull

    def forget_trainer(self, rank: Rank) -> None:
        """The trainer is gone."""
        self._pulls.pop(rank, None)


def divide_rates(numbers: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """Return the groups' numbers with every rate divided by the staleness, which counts as 1 at least.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in numbers if "lr" in group]  # type: ignore[operator]


def compensate_gradient(gradient: Tensor, values: Tensor, pulled: Tensor, strength: float) -> Tensor:
    """DC-ASGD: `g + λ·g⊙g⊙(w - w_pulled)`, the gradient as it would roughly be on today's values.

    All tensors are of one block, of shape (num_elements,), and are only read. Returns a new float32 tensor.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    total = gradient.to(torch.float32, copy=True)
    return total.addcmul_(total.square(), values - pulled, value=strength)
