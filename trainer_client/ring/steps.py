"""Steps of strategy ring: gradients are averaged among the trainers, and each steps its own optimizer.

    step t:  bucket by bucket, last layers first ──► sum of all trainers' ──► average ──► the optimizer's own step
             and then a small vector: which gradients there were, whose are not finite, who had none left
             (clipped: rank 0 broadcasts the average's norm, so that it is the same bits on all)

The sums are the same bits on all trainers, and so are the parameters. The vector decides the outcome
of the round, and no trainer steps before it. A trainer without batches joins the others' rounds until all are done.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, GradpostError, NonFiniteGradient
from ps_protocol.norms import clip_coefficient
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Rank, Round

from ..buffer_averages import BufferAverages
from ..collectives import choose_device
from ..flat_buckets import FlatBucket, FlatGradients, cut_buckets
from ..session import Session
from ..wrapped_optimizer import step_without_hooks
from .group import Group
from .tally import Tally, TallyVector


class RingSteps:
    """As `Steps`, of a trainer whose model has been declared."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        optimizer: Optimizer,
        group: Group,
        averages: BufferAverages,
    ) -> None:
        """`stored` is what else belongs to the model. Takes all values of the lowest rank; blocks for that."""
        self._client = session.client
        self._parameters = parameters
        self._optimizer = optimizer
        self._group = group
        self._buffer_averages = averages
        self.begun: Round = 0  # the newest one
        self.version: Round = 0  # the step that is in the parameters
        self.num_rollbacks = 0  # a ring never goes back
        self._has_written = False  # the script has, on purpose: the next round begins with its values
        self._device = device = choose_device(parameters)
        self._buckets = cut_buckets(
            parameters, self._agree_on(self._client.settings.chosen_bucket_bytes, device), device
        )
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.parts}
        self._flat = FlatGradients(parameters, self._buckets, self._send)
        self._totals: list[Tensor] = []  # of the buckets that have left: sums of what was put into them
        self._tally = TallyVector(list(parameters), group.rank, group.size, device)
        self._num_active = group.size  # in the round that is taken: trainers that had a batch
        self._has_joined = False
        self._is_void = False  # what has left for the next round is only a part
        self._is_midway = False  # in a round of which something is still to come
        self._gradients: Mapping[str, Tensor] = {}  # of the step that has begun
        self._said_numbers: list[HyperParameters] = []  # those of its GradScaler
        self._is_finite = True
        self._place_averages()
        self._broadcast({**parameters, **averages.means, **stored})
        averages.write_back()

    def _agree_on(self, bucket_bytes: int, device: torch.device) -> int:
        """That of the lowest rank: all have to cut alike."""
        chosen = torch.tensor([bucket_bytes], device=device)
        self._group.broadcast(chosen)
        self._group.wait()
        return int(chosen.item())

    def _broadcast(self, tensors: Mapping[str, Tensor], source: Rank = 0) -> None:
        """Replace the tensors by those of a rank; one that accompanies the others keeps its own. Blocks for all."""
        copies = {name: t.detach().to(self._device).contiguous() for name, t in tensors.items() if t.numel()}
        if self._has_joined:
            copies = {name: copy.clone() for name, copy in copies.items()}
        for copy in copies.values():
            self._group.broadcast(copy.reshape(-1).view(torch.uint8), source)  # whatever its dtype
        self._group.wait()
        if self._has_joined:
            return
        with torch.no_grad():
            for name, copy in copies.items():
                if copy.data_ptr() != tensors[name].data_ptr():
                    tensors[name].copy_(copy)

    # ------------------------------------------------------------------ the parameters

    def refresh_parameters(self) -> None:
        """A script may have given a parameter other memory. Does not block; BadModel if it has become another one."""
        if any(_place(parameter) != self._places[name] for name, parameter in self._parameters.items()):
            for name, parameter in self._parameters.items():
                before = self._places[name]
                if (parameter.shape, parameter.dtype) != before[:2]:
                    raise BadModel(
                        f"parameter {name!r} has become another one; all trainers agreed on it when the run began",
                        expected=f"{before[1]} {list(before[0])}",
                        actual=f"{parameter.dtype} {list(parameter.shape)}",
                    )
            self._place_averages()

    def replace_values(self, names: Collection[str]) -> None:
        """Begin the next step from the values that the parameters have now, on all trainers. Does not block.

        Those of the lowest rank that calls it count.
        """
        self._has_written = True

    def _place_averages(self) -> None:
        """Where each one's average lies for the optimizer: in its bucket, unless it wants it in another form."""
        self._places = {name: _place(parameter) for name, parameter in self._parameters.items()}
        self._averages: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            part = self._bucket_of[name].parts[name]
            is_alike = (parameter.dtype, parameter.device) == (part.dtype, part.device) and parameter.is_contiguous()
            self._averages[name] = part.view(parameter.shape) if is_alike else torch.empty_like(parameter).detach()

    # ------------------------------------------------------------------ gradients into the ring

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a flat gradient of the next step, before that begins. Does not block."""
        self._flat.add(name, gradient)

    def forget_gradients(self) -> None:
        """Give up what was added. What has left cannot be taken back, and then nor can this step be taken again."""
        self._flat.forget()

    def _send(self, bucket: FlatBucket) -> None:
        self._totals.append(bucket.flat.sum())
        self._group.all_reduce(bucket.flat)

    def begin(self, gradients: Mapping[str, Tensor], numbers: list[HyperParameters], *, is_finite: bool) -> None:
        """Begin the next step, with all its flat gradients. Does not block.

        `numbers` is the state of a GradScaler, if there is one, and `is_finite` its verdict on the gradients.
        """
        self._flat.check(gradients)
        self._is_midway = True
        self.begun = self.version + 1
        self._client.begin_round(self.begun)
        self._gradients, self._said_numbers = gradients, numbers
        self._is_finite = is_finite or self._client.nonfinite != "skip_round"
        self._send_all()

    def _send_all(self) -> None:
        self._flat.send_rest(self._gradients)
        self._say_of_round()
        self._group.all_reduce(self._tally.vector)

    def _say_of_round(self) -> None:
        if self._has_joined:
            self._tally.fill([], is_active=False, is_void=self._is_void)
            return
        self._tally.fill(
            self._gradients.keys(),
            is_finite=self._is_finite and not self._find_nonfinite(),
            numbers=_digest((_numbers(self._optimizer), self._said_numbers)),
            has_written=self._has_written,
        )

    def _find_nonfinite(self) -> list[str]:
        """Parameters of which this trainer's own gradient holds NaN or infinity, unless that is allowed."""
        if self._client.nonfinite == "allow":
            return []
        # A sum that is not finite may have overflowed; of one that is, all elements are.
        suspects = [
            bucket for bucket, total in zip(self._buckets, self._totals, strict=True) if not bool(torch.isfinite(total))
        ]
        names = (name for bucket in suspects for name in bucket.parts if name in self._gradients)
        return [name for name in names if not bool(torch.isfinite(self._gradients[name]).all())]

    # ------------------------------------------------------------------ after the last batch

    @torch.no_grad()
    def join_others(self) -> None:
        """Take part in the others' rounds, without gradients and without stepping, until all trainers are done.

        The collectives need all trainers; blocks for them. An error that ends the run of the others ends it, too, and
        is not raised. The script's tensors are not used any more. A trainer that gave up a round in the middle cannot
        take part.
        """
        if self._is_midway:
            return
        self._is_void = self._flat.discard_all()  # of a backward pass after which there was no step
        self._has_joined = self._client.membership.is_done = self._group.is_patient = True
        log, last = self._client.log, self.version
        try:
            while self._has_joined:
                self.begin({}, [], is_finite=True)
                self.take()
                if last == self.version - 1:
                    log.info("no batches are left here; the others have some, and this trainer takes part without any")
        except GradpostError as error:
            log.warning(f"this trainer was done, and does not take part any more: {error}")
        finally:
            self._client.begin_round(self._client.membership.round)

    def _end_of_all(self) -> None:
        """End the joint rounds: no trainer had a batch, so there is no such round."""
        self._has_joined = self._is_midway = False
        self.begun = self.version
        self._forget_round()

    # ------------------------------------------------------------------ the step

    def finish_due_step(self) -> None:
        """Wait for the step that has begun, and take it."""
        self.take()

    def take(self, names: Collection[str] | None = None) -> bool:
        """Wait for the step that has begun, and take it; always False, since a ring never rolls back.

        Blocks for the other trainers. Raises NonFiniteGradient under `reject` for this trainer's own gradient; the
        others wait for another one.
        """
        while self.begun > self.version:
            try:
                self._group.wait()
                tally = self._tally.read()
                if tally.is_void:
                    self._is_void = False
                    self._forget_round()
                    self._send_all()
                elif not tally.num_active:
                    self._end_of_all()
                elif not tally.has_same_numbers:
                    self._refuse_numbers()
                elif not tally.culprits or self._client.nonfinite != "reject":
                    self._end(tally)
                elif self._group.rank in tally.culprits:
                    self._refuse()
                else:
                    waits = f"round {self.begun} waits for another gradient"
                    self._say(f"{waits}: NaN or infinity in those of", tally.culprits)
                    self._forget_round()
                    self._send_all()
            except BaseException as error:
                self.begun = self.version
                self._flat.mark_spoiled(is_spoiled=not isinstance(error, NonFiniteGradient))
                raise
        return False

    def _refuse(self) -> None:
        names = ", ".join(map(repr, self._find_nonfinite()[:3]))
        self._forget_round()
        self._is_midway = False
        raise NonFiniteGradient(
            f"trainer {self._group.rank} has NaN or infinity in the gradient of {names} in round {self.begun}"
        )

    def _refuse_numbers(self) -> None:
        raise BadModel(
            "the numbers of optimizers and GradScalers, such as learning rates, are not the same on all trainers in "
            f"round {self.begun}, and parameters would drift apart. All trainers have to set and load the same; a "
            "schedule that looks at a loss has to look at one that all have",
            actual=[*(dict(group) for group in _numbers(self._optimizer)), *self._said_numbers],
        )

    def _say(self, text: str, ranks: Collection[Rank]) -> None:
        self._client.log.warning(f"{text} {', '.join(f'trainer {rank}' for rank in ranks)}")

    def _forget_round(self) -> None:
        self._totals.clear()
        self._flat.begin()

    def _end(self, tally: Tally) -> None:
        self._num_active = tally.num_active
        if tally.source is not None:
            self._broadcast(self._parameters, tally.source)
            self._has_written = False
        skipped = [self.begun] if tally.culprits else []
        self._client.outcomes = self._client.outcomes.advance(skipped, None, newest=self.begun, keep=2)
        if tally.culprits:
            self._client.grad_norm = None if self._client.max_grad_norm is None else math.nan
            self._client.metrics.skipped.inc()
            self._say(
                f"round {self.begun} was skipped by all trainers: NaN or infinity in gradients of", tally.culprits
            )
        else:
            self._average()
            if not self._has_joined:
                self._apply(set(tally.present))
            self._average_buffers()
        self._forget_round()
        self._is_midway = False
        self.version = self.begun
        if self._has_joined:
            return
        self._client.membership.round = self.version
        self._client.metrics.rounds.inc()
        self._client.metrics.round.set(self.version)

    @torch.no_grad()
    def _average(self) -> None:
        for bucket in self._buckets:
            bucket.flat.mul_(1 / self._num_active)
        if self._client.max_grad_norm is not None:
            self._clip(self._client.max_grad_norm)

    def _apply(self, present: Collection[str]) -> None:
        """Step with the averages in place of the script's own gradients, which are there again afterwards."""
        own = {name: parameter.grad for name, parameter in self._parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    average, part = self._averages[name], self._bucket_of[name].parts[name]
                    if average.data_ptr() != part.data_ptr():
                        average.copy_(part.view(parameter.shape))
                    parameter.grad = average if name in present else None
            step_without_hooks(self._optimizer)
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = own[name]

    def _average_buffers(self) -> None:
        """Average the buffers of the trainers that had a batch, in one more collective."""
        averages = self._buffer_averages
        means = averages.means
        if not means:
            return
        changed = {} if self._has_joined else averages.changed_values()  # it looks at the script's model
        values = {name: mean.view(-1) for name, mean in means.items()} | changed
        flat = torch.cat([value.float() for value in values.values()]).to(self._tally.vector.device)
        if self._has_joined:
            flat.zero_()
        self._group.all_reduce(flat)
        self._group.wait()
        if self._has_joined:
            return
        parts = torch.split(flat.div_(self._num_active), [mean.numel() for mean in means.values()])
        for mean, part in zip(means.values(), parts, strict=True):
            mean.copy_(part.view(mean.shape))
        averages.write_back()

    def _clip(self, max_norm: float) -> None:
        """Multiply the averages so that their norm is `max_norm` at most; parameters without a gradient have zeros."""
        squares = torch.stack([bucket.sum_of_squares() for bucket in self._buckets]).sum(0, keepdim=True)
        self._group.broadcast(squares)  # machines may round a sum differently, and nothing would mend that
        self._group.wait()
        self._client.grad_norm = norm = math.sqrt(float(squares))
        coefficient = clip_coefficient(norm, max_norm)
        for bucket in self._buckets if coefficient != 1 else ():
            bucket.flat.mul_(coefficient)


def _numbers(optimizer: Optimizer) -> list[list[tuple[str, list[float]]]]:
    """Return the numbers that each parameter group steps with.

    A group of a loaded state may lack a default that `torch.optim.Optimizer` adds by itself, such as `differentiable`.
    """
    found = []
    for group in optimizer.param_groups:
        values = ((key, group[key]) for key in sorted(optimizer.defaults) if key in group)
        flat = ((key, value if isinstance(value, (tuple, list)) else (value,)) for key, value in values)
        numbers = ((key, [float(v) for v in one if _is_number(v)]) for key, one in flat)
        found.append([(key, some) for key, some in numbers if some])
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _digest(numbers: object) -> int:
    """Return 24 bits that differ for other numbers; a float32 holds them exactly."""
    return zlib.crc32(repr(numbers).encode()) >> 8


def _place(parameter: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...], torch.device]:
    return parameter.shape, parameter.dtype, parameter.stride(), parameter.device
