"""The engine of strategy ring: gradients are averaged among the trainers, and each steps its own optimizer.

    step t:  bucket by bucket, last layers first ──► sum of all trainers' ──► average ──► the optimizer's own step
             and then a small vector: which gradients there were, which ranks have NaN or no batch left
             (clipped: rank 0 broadcasts the average's norm, so that it is the same bits on all)

The sums are the same bits on all trainers, and so are the parameters. The vector decides the outcome
of the round, and no trainer steps before it. A trainer without batches joins the others' rounds until all are done.

With `strategy="local"` the ring has one trainer, which exchanges nothing. Settings that only change when and how values
travel have no effect there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, ContributionConflict, GradpostError, NonFiniteGradient
from ps_protocol.norms import clip_coefficient
from ps_protocol.optimizers import MEAN
from ps_protocol.vocabulary import Rank, Round

from ..session.collectives import DONE_TIMEOUT, BroadcastBuffer, Group, Tally, TallyVector, cut_buckets
from ..session.session import Session
from ..transport.tensors import elements_of
from .engine import StepGradients, StepProgress
from .model_tensors import TrainedModel
from .script_optimizers import LocalSteps, members_of, step_with_gradients


class RingEngine:
    """The engine of a trainer in a ring: all trainers sum their gradients, and each steps its own optimizer."""

    def __init__(
        self, session: Session, model: TrainedModel, optimizer: Optimizer, group: Group, local: LocalSteps | None
    ) -> None:
        """Write all values of the lowest rank to the model. Blocks for the other trainers.

        `optimizer` steps with the average; with local steps it is the outer optimizer.
        """
        self.progress = StepProgress()
        self._client = session.client
        self._parameters = model.parameters
        self._optimizer = optimizer
        self._group = group
        self._local = local
        self._buffer_averages = model.averages
        self._has_written = False  # the script has, on purpose: the next round begins with its values
        self._tally = TallyVector(list(model.parameters), group.rank, group.size, group.device)
        self._is_done = False  # no batches are left here
        self._is_broken = False  # a round was given up after gradients were sent
        dense = {name: each for name, each in model.parameters.items() if name not in model.sparse}
        self._buckets = cut_buckets(dense, self._agree_on_bucket_bytes(), group.device)
        self._rows: dict[str, Tensor] = {}  # sparse gradients of this round, which only a trainer alone may have
        self._averages = {name: part for bucket in self._buckets for name, part in bucket.parts.items()}
        self._broadcast({**model.pulled, **model.stored})
        model.averages.write_back()
        if local is not None:
            local.begin_count()

    def _agree_on_bucket_bytes(self) -> int:
        """Return `bucket_bytes` of the lowest rank, since all trainers must cut the same buckets."""
        chosen = torch.tensor([self._client.settings.chosen_bucket_bytes], device=self._group.device)
        self._group.collectives.broadcast(chosen)
        self._group.wait()
        return int(chosen.item())

    def _broadcast(self, tensors: Mapping[str, Tensor], source: Rank = 0) -> None:
        """Replace the tensors by those of a rank; a trainer without batches keeps its own. Blocks for all trainers."""
        if self._group.size == 1:
            return
        values, sends = BroadcastBuffer(tensors, self._group.device), self._group.rank == source
        with self._client.coordinator.reporting_wait():
            values.broadcast(self._group.collectives, source, sends=sends)
        if not sends and not self._is_done:
            values.write_back()

    # ------------------------------------------------------------------ parameters and gradients

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`. The optimizer steps the parameters in their current memory."""

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`. The lowest rank that calls it sets all parameters."""
        self._has_written = True
        if self._local is not None:
            self._local.begin_count()

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`."""
        return False  # no step is ever on its way

    # ------------------------------------------------------------------ rounds

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`. The other trainers wait for a trainer whose step is refused."""
        gradients, policy = contribution.gradients, self._client.run.nonfinite
        if self._is_broken:
            raise ContributionConflict("a round was given up after gradients were sent. Restart the script")
        nonfinite = [] if policy == "allow" else self._find_nonfinite(gradients)
        if nonfinite and policy == "reject":
            raise NonFiniteGradient(
                f"trainer {self._group.rank} has NaN or infinity in the gradient of "
                f"{', '.join(map(repr, nonfinite[:3]))} in round {self.progress.version + 1}. To skip such rounds, set "
                "--nonfinite skip_round"
            )
        self._tally.fill(
            gradients.keys(),
            is_finite=policy != "skip_round" or (contribution.is_finite and not nonfinite),
            terms=_numbers(self._optimizer),
            has_written=self._has_written,
        )
        self._rows = {name: gradient for name, gradient in gradients.items() if gradient.is_sparse}
        self._take_round(gradients)

    def _find_nonfinite(self, gradients: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters whose gradient on this trainer holds NaN or infinity."""
        if not gradients:
            return []
        device = self._group.device
        elements = {name: elements_of(gradient) for name, gradient in gradients.items()}
        totals = torch.stack([each.sum(dtype=torch.float32).to(device) for each in elements.values()])
        # A sum that is not finite may have overflowed; of one that is, all elements are.
        suspects = [name for name, is_sure in zip(elements, totals.isfinite().tolist(), strict=True) if not is_sure]
        return [name for name in suspects if not bool(elements[name].isfinite().all())]

    @torch.no_grad()
    def join_others(self) -> None:
        """Take part in the others' rounds, without gradients and without stepping, until all trainers are done.

        The collectives need all trainers; blocks for them. An error that ends the run ends the joint rounds, too, and
        is not raised. The script's tensors are not used any more.
        """
        log, last = self._client.log, self.progress.version
        if self._is_broken:
            log.warning("this trainer cannot join the others' rounds: it gave up a step after gradients were sent")
            return
        self._is_done = self._client.coordinator.is_done = True
        self._group.collectives.timeout = DONE_TIMEOUT
        try:
            while self._join_round():
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

    def _join_round(self) -> bool:
        self._tally.fill([], is_active=False)
        return self._take_round({})

    def _take_round(self, gradients: Mapping[str, Tensor]) -> bool:
        """Take the next round as all trainers do; return False if none has a batch, so that there is no such round."""
        progress = self.progress
        progress.begun = self._client.coordinator.counted_round = progress.version + 1
        try:
            for bucket in self._buckets:
                bucket.fill(gradients)
                self._group.collectives.all_reduce(bucket.flat)
            self._group.collectives.all_reduce(self._tally.vector)
            self._group.wait()
            tally = self._tally.read()
            if tally.num_active:
                self._end(tally)
        except BaseException:
            self._is_broken = self._group.size > 1  # a trainer alone has sent nothing
            raise
        finally:
            progress.begun = progress.version
        return tally.num_active > 0

    def _end(self, tally: Tally) -> None:
        round_, log = self.progress.begun, self._client.log
        if not tally.has_same_terms:
            raise BadModel(
                f"hyperparameters differ between trainers in round {round_}. Set the same values on all; give "
                "ReduceLROnPlateau a loss averaged over all trainers",
                actual=_numbers(self._optimizer),
            )
        if tally.source is not None:
            self._broadcast(self._parameters, tally.source)
            self._has_written = False
        grad_norm = None
        if tally.nonfinite:
            ranks = ", ".join(f"trainer {rank}" for rank in tally.nonfinite)
            log.warning(f"round {round_} was skipped by all trainers: NaN or infinity in gradients of {ranks}")
        else:
            grad_norm = self._average(tally)
            if not self._is_done:
                self._apply(tally.present)
            self._average_buffers(tally)
        self.progress.version = round_
        if not self._is_done:
            self._note_results(round_, grad_norm, is_skipped=bool(tally.nonfinite))

    def _note_results(self, round_: Round, grad_norm: float | None, *, is_skipped: bool) -> None:
        client = self._client
        if is_skipped:
            client.metrics.skipped.inc()
            grad_norm = None if client.run.max_grad_norm is None else math.nan
        client.adopt_results(round_, [round_] if is_skipped else [], grad_norm)
        client.metrics.rounds.inc()
        client.metrics.round.set(round_)

    @torch.no_grad()
    def _average(self, tally: Tally) -> float | None:
        """Replace the sums by averages, which are clipped; return their norm before that, if it was computed."""
        for bucket in self._buckets:
            bucket.flat.mul_(1 / tally.num_active)
        max_norm = self._client.run.max_grad_norm
        return None if max_norm is None else self._clip(max_norm)

    def _apply(self, present: Collection[str]) -> None:
        """Step with the averages; with local steps from the values before them."""
        for name, value in ({} if self._local is None else self._local.starting_values).items():
            self._parameters[name].copy_(value)
        averages = {name: rows.to(self._parameters[name]) for name, rows in self._rows.items()}
        for name in present:
            if name in averages:
                continue
            parameter, average = self._parameters[name], self._averages[name]
            averages[name] = average.view(parameter.shape)
            if not parameter.is_contiguous() or (parameter.dtype, parameter.device) != (average.dtype, average.device):
                averages[name] = torch.empty_like(parameter).copy_(averages[name])
        step_with_gradients(self._optimizer, self._parameters, averages)
        if self._local is not None:
            self._local.begin_count()

    def _average_buffers(self, tally: Tally) -> None:
        """Average the buffers of the trainers that had a batch, or take those of the lowest, in one more collective."""
        averages = self._buffer_averages
        means = averages.means
        if not means:
            return
        changed = {} if self._is_done else averages.changed_values()  # the call reads the script's model
        values = {name: mean.view(-1) for name, mean in means.items()} | changed
        flat = torch.cat([value.float() for value in values.values()]).to(self._group.device)
        num_averaged = sum(means[name].numel() for name, rule in averages.rules.items() if rule == MEAN)
        if self._is_done:
            flat.zero_()
        elif self._group.rank != tally.lowest:
            flat[num_averaged:].zero_()
        self._group.collectives.all_reduce(flat)
        self._group.wait()
        if self._is_done:
            return
        flat[:num_averaged].div_(tally.num_active)
        parts = torch.split(flat, [mean.numel() for mean in means.values()])
        for mean, part in zip(means.values(), parts, strict=True):
            mean.copy_(part.view(mean.shape))
        averages.warn_of_differences(self._client.log)
        averages.write_back()

    def _clip(self, max_norm: float) -> float:
        """Multiply the averages so that their norm is `max_norm` at most, and return their norm before that.

        Parameters without a gradient have zeros.
        """
        sums = [torch.zeros((), dtype=torch.float64, device=self._group.device)]
        sums += [bucket.sum_of_squares() for bucket in self._buckets]
        sums += [elements_of(rows).double().square().sum().to(self._group.device) for rows in self._rows.values()]
        squares = torch.stack(sums).sum(0, keepdim=True)
        self._group.collectives.broadcast(squares)  # machines may round a sum differently, and nothing would mend that
        self._group.wait()
        norm = math.sqrt(float(squares))
        coefficient = clip_coefficient(norm, max_norm)
        for bucket in self._buckets if coefficient != 1 else ():
            bucket.flat.mul_(coefficient)
        self._rows = {name: rows * coefficient for name, rows in self._rows.items()}
        return norm


def _numbers(optimizer: Optimizer) -> list[dict[str, list[float]]]:
    """Return the numbers that each parameter group steps with.

    `load_state_dict` adds defaults that are no numbers, such as `differentiable`, and a loaded group may lack others.
    """
    return [
        {key: floats for key in sorted(member.defaults) if (floats := _floats(group.get(key)))}
        for member in members_of(optimizer).values()
        for group in member.param_groups
    ]


def _floats(value: object) -> list[float]:
    """Return the numbers in a hyperparameter; those that are neither numbers nor sequences of them count as none."""
    if isinstance(value, (tuple, list)):
        return [number for element in value for number in _floats(element)]
    if isinstance(value, Tensor):
        return [float(number) for number in value.flatten().tolist()]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
