"""Warnings about contributions that most likely show an error of the script: different, equal or absent ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import xxhash

from ps_protocol.optimizers import find_difference
from ps_protocol.vocabulary import Rank
from services.runtime.logs import get_logger

from ..shard.bodies import StagedBlock
from ..shard.layout import ShardLayout
from .rounds import Apply

log = get_logger()

MAX_ROUNDS = 10
SAMPLE_BYTES = 1 << 14  # of each contribution are compared, on the event loop: 64 contributions take 1 ms
MIN_BYTES = 64  # of each block in it


class ScriptWarnings:
    """The warnings of one pserver, each logged once. Pserver 0 alone `reports_all`, since every pserver sees some."""

    def __init__(self, layout: ShardLayout, *, reports_all: bool) -> None:
        self._layout = layout
        self._reports_all = reports_all
        self._has_named_difference = False
        self._equal = EqualGradients()
        self._absent = AbsentGradients(layout)

    def check_round(self, apply: Apply[StagedBlock]) -> int:
        """Warn about the contributions of a round. Returns how many have other hyperparameters than the lowest rank."""
        others = [
            (rank, contribution.hyper_parameters)
            for rank, contribution in zip(apply.ranks, apply.contributions, strict=True)
            if contribution.hyper_parameters != apply.hyper_parameters
        ]
        if others and self._reports_all and not self._has_named_difference:
            self._has_named_difference = True
            rank, hyper_parameters = others[0]
            name, used, ignored = find_difference(apply.hyper_parameters, hyper_parameters)
            log.warning(
                f"{name} is {used} on trainer {apply.ranks[0]} and {ignored} on trainer {rank}, and all step "
                f"with that of trainer {apply.ranks[0]}. Set the same on all trainers"
            )
        if (found := self._absent.find(apply)) is not None:
            rank, name = found
            log.warning(
                f"trainer {rank} has sent no gradient of {self._layout.place[name].block.parameter!r} in "
                f"{MAX_ROUNDS} rounds in which others had one: it is frozen on this trainer, or not used by its part "
                "of the model. The mean counts zeros for it; if that is not intended, freeze it on all trainers or on "
                "none"
            )
        if self._reports_all and (ranks := self._equal.find(apply)) is not None:
            log.warning(
                f"trainers {ranks[0]} and {ranks[1]} push the same gradients: does each read its own part of the data? "
                "(torch.utils.data.DistributedSampler)"
            )
        return len(others)


class EqualGradients:
    """The search. It ends after ten successive rounds with equal gradients, or after ten rounds without any."""

    def __init__(self) -> None:
        self._pairs: set[tuple[Rank, Rank]] = set()  # with equal gradients in each of the last `_num_equal` rounds
        self._num_equal = self._num_different = 0

    def find(self, apply: Apply[StagedBlock]) -> tuple[Rank, Rank] | None:
        """Compare the gradients of a round. Return two ranks, once, whose gradients were equal in ten of them."""
        if len(apply.ranks) < 2 or MAX_ROUNDS in (self._num_equal, self._num_different):
            return None
        found = {
            rank: _digest(contribution.blocks)
            for rank, contribution in zip(apply.ranks, apply.contributions, strict=True)
        }
        digests = {rank: digest for rank, digest in found.items() if digest is not None}
        if len(digests) < 2:
            return None
        pairs = {(one, other) for one, other in combinations(digests, 2) if digests[one] == digests[other]}
        self._pairs = pairs & self._pairs if self._num_equal else pairs
        self._num_equal = self._num_equal + 1 if self._pairs else 0
        self._num_different += not self._pairs
        return min(self._pairs) if self._num_equal == MAX_ROUNDS else None


class AbsentGradients:
    """The search for parameters of which one trainer sends no gradient in ten rounds, and others do.

    A parameter is searched for on the pserver of its first block. Rounds without any gradient of it do not count.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._trained = {place.name for place in layout.places if not place.buffer_rule and not place.block.begin}
        self._num_blocks = len(layout.places)
        self._num_absent = Counter[tuple[Rank, str]]()  # rounds since a rank last sent a block
        self._has_found = False

    def find(self, apply: Apply[StagedBlock]) -> tuple[Rank, str] | None:
        """Compare the gradients of a round. Return, once, a rank and a block that it lacked in ten rounds."""
        if self._has_found or len(apply.ranks) < 2 or apply.nonfinite:
            return None
        lacked = {  # a contribution of all blocks is not searched: 64 times 1000 blocks take 1 ms
            rank: self._trained - staged.blocks.keys() if len(staged.blocks) < self._num_blocks else set[str]()
            for rank, staged in zip(apply.ranks, apply.contributions, strict=True)
        }
        unused = set.intersection(*lacked.values())
        absent = [(rank, name) for rank in lacked for name in lacked[rank] - unused]
        sent = [(rank, name) for rank, name in self._num_absent if name not in lacked.get(rank, ())]
        self._num_absent.update(absent)
        for block in sent:
            del self._num_absent[block]
        found = [block for block in absent if self._num_absent[block] == MAX_ROUNDS]
        self._has_found = bool(found)
        return min(found, default=None)


def _digest(blocks: Mapping[str, StagedBlock]) -> bytes | None:
    """Return the digest of the first bytes of each block, of 256 blocks at most; None if all of them are zero."""
    digest, is_zero = xxhash.xxh3_128(), True
    names = sorted(blocks)[: SAMPLE_BYTES // MIN_BYTES]
    for name in names:
        for view in blocks[name].bytes():
            part = bytes(view[: SAMPLE_BYTES // len(names)])
            digest.update(part)
            is_zero = is_zero and part.count(0) == len(part)
    return None if is_zero else digest.digest()
