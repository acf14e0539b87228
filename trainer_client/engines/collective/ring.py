"""The engine of strategy ring: gradients are averaged among the trainers, and each steps its own optimizer.

    step t:  bucket by bucket, last layers first ──► sum of all trainers' ──► average ──► the optimizer's own step
             and then a small vector: which gradients there were, which ranks have NaN or no batch left
             (clipped: rank 0 broadcasts the average's norm, so that it is the same bits on all)

The sums are the same bits on all trainers, and so are the parameters. The vector decides the outcome
of the round, and no trainer steps before it. A trainer without batches joins the others' rounds until all are done.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, GradpostError, NonFiniteGradient
from ps_protocol.norms import clip_coefficient
from ps_protocol.optimizers import MEAN
from ps_protocol.vocabulary import Rank

from ...session.session import Session
from ..combined_optimizer import members_of
from ..engine import StepGradients, StepProgress, note_own_round
from ..local_steps import step_with_gradients
from ..model_tensors import TrainedModel
from .buffers import FlatBucket, FlatGradients
from .ring_group import Group, Tally, TallyVector

NUM_COMPARED = 10  # rounds, after which a gradient that was always absent is a warning


class RingEngine:
    """The engine of a trainer in a ring: all trainers sum their gradients, and each steps its own optimizer."""

    def __init__(self, session: Session, model: TrainedModel, optimizer: Optimizer, group: Group) -> None:
        """Write all values of the lowest rank to the model. Blocks for the other trainers."""
        self.progress = StepProgress()
        self._client = session.client
        self._parameters = parameters = model.parameters
        self._optimizer = optimizer
        self._group = group
        self._buffer_averages = model.averages
        self._has_written = False  # the script has, on purpose: the next round begins with its values
        self._totals: list[Tensor] = []  # sums of this trainer's own gradients in each sent bucket
        self._tally = TallyVector(list(parameters), group.rank, group.size, group.device)
        self._num_active = group.size  # trainers that had a batch in the round
        self._has_joined = False  # no batches are left here
        self._is_void = False  # the gradients that have left for the next round are incomplete
        self._is_midway = False  # a round has begun, and not ended
        self._contribution = StepGradients({})
        self._num_absent = Counter[str]()  # rounds in which others had a gradient, since this trainer last had one
        self._has_warned_of_absent = False
        self._gradients = FlatGradients(parameters, self._agree_on_bucket_bytes(), group.device, self._send)
        self.follow_parameters()
        self._broadcast({**model.pulled, **model.stored})
        model.averages.write_back()

    def _agree_on_bucket_bytes(self) -> int:
        """Return `bucket_bytes` of the lowest rank, since all trainers must cut the same buckets."""
        chosen = torch.tensor([self._client.settings.chosen_bucket_bytes], device=self._group.device)
        self._group.collectives.broadcast(chosen)
        self._group.wait()
        return int(chosen.item())

    def _broadcast(self, tensors: Mapping[str, Tensor], source: Rank = 0) -> None:
        """Replace the tensors by those of a rank; a trainer without batches keeps its own. Blocks for all trainers."""
        copies = {name: t.detach().to(self._group.device).contiguous() for name, t in tensors.items() if t.numel()}
        if self._has_joined:
            copies = {name: copy.clone() for name, copy in copies.items()}
        for copy in copies.values():
            self._group.collectives.broadcast(copy.reshape(-1).view(torch.uint8), source)  # whatever its dtype
        self._wait()
        if self._has_joined:
            return
        with torch.no_grad():
            for name, copy in copies.items():
                if copy.data_ptr() != tensors[name].data_ptr():
                    tensors[name].copy_(copy)

    def _wait(self) -> None:
        self._group.wait(has_limit=not self._has_joined)

    # ------------------------------------------------------------------ the parameters

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The lowest rank that calls it sets all parameters."""
        self._has_written = True

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`. Averages stay in their bucket if they have the same form."""
        self._averages: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            part = self._gradients.bucket_of[name].parts[name]
            is_alike = (parameter.dtype, parameter.device) == (part.dtype, part.device) and parameter.is_contiguous()
            self._averages[name] = part.view(parameter.shape) if is_alike else torch.empty_like(parameter).detach()

    # ------------------------------------------------------------------ gradients into the ring

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Implement `StepEngine.add_gradient`."""
        self._gradients.add(name, gradient)

    def discard_gradients(self) -> None:
        """Implement `StepEngine.discard_gradients`."""
        self._gradients.discard()

    def _send(self, bucket: FlatBucket) -> None:
        self._totals.append(bucket.flat.sum())
        self._group.collectives.all_reduce(bucket.flat)

    def _send_all(self) -> None:
        self._gradients.send_rest(self._contribution.gradients)
        self._fill_tally()
        self._group.collectives.all_reduce(self._tally.vector)

    def _fill_tally(self) -> None:
        if self._has_joined:
            self._tally.fill([], is_active=False, is_void=self._is_void)
            return
        has_overflowed = not self._contribution.is_finite and self._client.run.nonfinite == "skip_round"
        self._tally.fill(
            self._contribution.gradients.keys(),
            is_finite=not has_overflowed and not self._find_nonfinite(),
            numbers=_digest((_numbers(self._optimizer), self._contribution.completion.hyper_parameters)),
            has_written=self._has_written,
        )

    def _find_nonfinite(self) -> list[str]:
        """Return parameters whose gradient on this trainer holds NaN or infinity, unless that is allowed."""
        if self._client.run.nonfinite == "allow":
            return []
        gradients = self._contribution.gradients
        # A sum that is not finite may have overflowed; of one that is, all elements are.
        suspects = [
            bucket
            for bucket, total in zip(self._gradients.buckets, self._totals, strict=True)
            if not bool(torch.isfinite(total))
        ]
        names = (name for bucket in suspects for name in bucket.parts if name in gradients)
        return [name for name in names if not bool(torch.isfinite(gradients[name]).all())]

    # ------------------------------------------------------------------ after the last batch

    @torch.no_grad()
    def join_others(self) -> None:
        """Take part in the others' rounds, without gradients and without stepping, until all trainers are done.

        The collectives need all trainers; blocks for them. An error that ends the run ends the joint rounds, too, and
        is not raised. The script's tensors are not used any more. A trainer that gave up a round in the middle cannot
        take part.
        """
        if self._is_midway:
            return
        self._is_void = self._gradients.discard()  # True if a backward pass without a step has sent gradients
        self._gradients.is_spoiled = False
        self._has_joined = True
        self._client.coordinator.is_done = True
        log, last = self._client.log, self.progress.version
        try:
            while self._has_joined:
                self.step(StepGradients({}))
                if last == self.progress.version - 1:
                    log.info(
                        "this trainer has no batches left, and joins the rounds of the other trainers without gradients"
                    )
            if self.progress.version > last:
                log.warning(f"the run ended after round {self.progress.version}, and this trainer holds round {last}")
        except GradpostError as error:
            log.warning(f"this trainer was done, and no longer takes part: {error}")
        finally:
            self._client.coordinator.counted_round = 0

    def _end_of_all(self) -> None:
        """End the joint rounds: no trainer had a batch, so there is no such round."""
        self._has_joined = self._is_midway = False
        self.progress.begun = self.progress.version
        self._clear_round()

    # ------------------------------------------------------------------ the step

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`."""
        return False  # no step is ever on its way

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. Under `reject` the other trainers wait for another gradient of this one."""
        progress = self.progress
        self._gradients.check(contribution.gradients)
        self._is_midway = True
        progress.begun = progress.version + 1
        self._client.coordinator.counted_round = progress.begun
        self._contribution = contribution
        self._send_all()
        while progress.begun > progress.version:
            try:
                self._wait()
                self._decide(self._tally.read())
            except BaseException as error:
                progress.begun = progress.version
                self._gradients.is_spoiled = not isinstance(error, NonFiniteGradient)
                raise

    def _decide(self, tally: Tally) -> None:
        """End the round as all trainers do, or send the gradients again that it lacks."""
        if tally.is_void:
            self._is_void = False
            self._clear_round()
            self._send_all()
        elif not tally.num_active:
            self._end_of_all()
        elif not tally.has_same_numbers:
            raise BadModel(
                f"hyperparameters or GradScaler states differ between trainers in round {self.progress.begun}. "
                "Set the same values on all; give ReduceLROnPlateau a loss averaged over all trainers",
                actual=[
                    *(dict(group) for group in _numbers(self._optimizer)),
                    *self._contribution.completion.hyper_parameters,
                ],
            )
        elif not tally.nonfinite or self._client.run.nonfinite != "reject":
            self._end(tally)
        elif self._group.rank in tally.nonfinite:
            names = ", ".join(map(repr, self._find_nonfinite()[:3]))
            self._clear_round()
            self._is_midway = False
            raise NonFiniteGradient(
                f"trainer {self._group.rank} has NaN or infinity in the gradient of {names} in round "
                f"{self.progress.begun}. To skip such rounds, set --nonfinite skip_round"
            )
        else:
            waits = f"round {self.progress.begun} waits for a corrected gradient"
            self._log(f"{waits}: NaN or infinity in the gradients of", tally.nonfinite)
            self._clear_round()
            self._send_all()

    def _log(self, text: str, ranks: Collection[Rank]) -> None:
        self._client.log.warning(f"{text} {', '.join(f'trainer {rank}' for rank in ranks)}")

    def _clear_round(self) -> None:
        self._totals.clear()
        self._gradients.clear()

    def _end(self, tally: Tally) -> None:
        round_ = self.progress.begun
        self._num_active = tally.num_active
        if tally.source is not None:
            self._broadcast(self._parameters, tally.source)
            self._has_written = False
        grad_norm = None
        if tally.nonfinite:
            self._log(f"round {round_} was skipped by all trainers: NaN or infinity in gradients of", tally.nonfinite)
        else:
            grad_norm = self._average()
            if not self._has_joined:
                self._apply(set(tally.present))
                self._warn_of_absent(set(tally.present) - self._contribution.gradients.keys())
            self._average_buffers(tally)
        self._clear_round()
        self._is_midway = False
        self.progress.version = round_
        if not self._has_joined:
            note_own_round(self._client, round_, grad_norm, is_skipped=bool(tally.nonfinite))

    def _warn_of_absent(self, absent: Collection[str]) -> None:
        """Log once that others had a gradient in ten rounds since this trainer last had one."""
        for name in self._num_absent.keys() & self._contribution.gradients.keys():
            del self._num_absent[name]
        self._num_absent.update(absent)
        found = [name for name in absent if self._num_absent[name] == NUM_COMPARED]
        if found and not self._has_warned_of_absent:
            self._has_warned_of_absent = True
            self._client.log.warning(
                f"trainer {self._group.rank} has sent no gradient of {min(found)!r} in {NUM_COMPARED} rounds in which "
                "others had one: it is frozen on this trainer, or not used by its part of the model. The mean counts "
                "zeros for it; if that is not intended, freeze it on all trainers or on none"
            )

    @torch.no_grad()
    def _average(self) -> float | None:
        """Replace the sums by averages, which are clipped; return their norm before that, if it was computed."""
        for bucket in self._gradients.buckets:
            bucket.flat.mul_(1 / self._num_active)
        max_norm = self._client.run.max_grad_norm
        return None if max_norm is None else self._clip(max_norm)

    def _apply(self, present: Collection[str]) -> None:
        """Step with the averages."""
        with torch.no_grad():
            for name, average in self._averages.items():
                part = self._gradients.bucket_of[name].parts[name]
                if average.data_ptr() != part.data_ptr():
                    average.copy_(part.view(average.shape))
        averages = {name: average for name, average in self._averages.items() if name in present}
        step_with_gradients(self._optimizer, self._parameters, averages)

    def _average_buffers(self, tally: Tally) -> None:
        """Average the buffers of the trainers that had a batch, or take those of the lowest, in one more collective."""
        averages = self._buffer_averages
        means = averages.means
        if not means:
            return
        changed = {} if self._has_joined else averages.changed_values()  # the call reads the script's model
        values = {name: mean.view(-1) for name, mean in means.items()} | changed
        flat = torch.cat([value.float() for value in values.values()]).to(self._group.device)
        num_averaged = sum(means[name].numel() for name, rule in averages.rules.items() if rule == MEAN)
        if self._has_joined:
            flat.zero_()
        elif self._group.rank != tally.lowest:
            flat[num_averaged:].zero_()
        self._group.collectives.all_reduce(flat)
        self._wait()
        if self._has_joined:
            return
        flat[:num_averaged].div_(self._num_active)
        parts = torch.split(flat, [mean.numel() for mean in means.values()])
        for mean, part in zip(means.values(), parts, strict=True):
            mean.copy_(part.view(mean.shape))
        averages.warn_of_differences(self._client.log)
        averages.write_back()

    def _clip(self, max_norm: float) -> float:
        """Multiply the averages so that their norm is `max_norm` at most, and return their norm before that.

        Parameters without a gradient have zeros.
        """
        buckets = self._gradients.buckets
        squares = torch.stack([bucket.sum_of_squares() for bucket in buckets]).sum(0, keepdim=True)
        self._group.collectives.broadcast(squares)  # machines may round a sum differently, and nothing would mend that
        self._wait()
        norm = math.sqrt(float(squares))
        coefficient = clip_coefficient(norm, max_norm)
        for bucket in buckets if coefficient != 1 else ():
            bucket.flat.mul_(coefficient)
        return norm


def _numbers(optimizer: Optimizer) -> list[list[tuple[str, list[float]]]]:
    """Return the numbers that each parameter group steps with.

    A group of a loaded state may lack a default that `torch.optim.Optimizer` adds by itself, such as `differentiable`.
    """
    found = []
    for member in members_of(optimizer).values():
        for group in member.param_groups:
            numbers = ((key, _floats(group[key])) for key in sorted(member.defaults) if key in group)
            found.append([(key, floats) for key, floats in numbers if floats])
    return found


def _floats(value: object) -> list[float]:
    """Return the numbers in a hyperparameter; those that are neither numbers nor sequences of them count as none."""
    if isinstance(value, (tuple, list)):
        return [number for element in value for number in _floats(element)]
    if isinstance(value, Tensor):
        return [float(number) for number in value.flatten().tolist()]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def _digest(numbers: object) -> int:
    """Return 24 bits that differ for other numbers; a float32 holds them exactly."""
    return zlib.crc32(repr(numbers).encode()) >> 8
