"""Values that an administrator sets are kept until their round."""

from __future__ import annotations

from torch import Tensor, ones

from ps_protocol.messages import Controls
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.layout import ShardLayout
from services.pserver.replacements import Replacements

from .support import encode


def test_two_parameters_may_be_set_to_the_same_values() -> None:
    specs = [ParameterSpec("one", (6,)), ParameterSpec("other", (6,))]
    plan = make_plan(specs, 1)
    replacements = Replacements(ShardLayout(plan, 0))
    values: dict[str, Tensor] = {}
    for spec in specs:
        [block] = plan.blocks_of[spec.name]
        values[block.name] = ones(6)
        replacements.add(spec.name, "5e1f", 7, encode({block.name: ones(6)}))
    found = replacements.blocks_for(7, Controls(since=7, replaced={"one": "5e1f", "other": "5e1f"}))
    assert found.keys() == values.keys()
