"""Models, names and settings for the property tests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from ps_protocol.optimizers import RULES, SPARSE_NUMBERS, OptimizerSpec, check_optimizer
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.vocabulary import DTYPE_BYTES, PARAMETER_DTYPES, PLACEMENTS, ParameterSpec

few = settings(max_examples=30)  # for tests that draw whole models: each example is a large one

# Unusual names of parameters: quotes, line breaks, other scripts, the suffix of a block, a path, an escape.
AWKWARD_NAMES = (
    '"',
    "\\",
    "a\nb",
    "weiß.重み",
    "\U0001f40d",
    "\0",
    "w.block0",
    "../w",
    "\x1b[31m",
    "%41",
    " ",
    "__proto__",
)

names = st.one_of(
    st.sampled_from(AWKWARD_NAMES),
    st.integers(0, 99).map("layers.{}.weight".format),
    st.text(min_size=1, max_size=8),
)
shapes = st.sampled_from([(), (0,), (10, 1000), (3, 0, 2)]) | st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from(PARAMETER_DTYPES)
placements = st.sampled_from(PLACEMENTS)
all_num_pservers = st.integers(1, 9)
all_min_block_sizes = st.sampled_from([1, 2, 7, 100, 8192]) | st.integers(1, 20_000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@st.composite
def optimizers(draw: st.DrawFn, num_groups: int) -> OptimizerSpec:
    name = draw(st.sampled_from(sorted(RULES)))
    flags = st.fixed_dictionaries({flag: st.booleans() for flag in RULES[name].flags})
    return check_optimizer(name, draw(st.lists(flags, min_size=num_groups, max_size=num_groups)))


@st.composite
def parameter_lists(draw: st.DrawFn, num_groups: int = 1) -> list[ParameterSpec]:
    groups = st.integers(0, num_groups - 1)
    return [
        ParameterSpec(name, draw(shapes), draw(dtypes), draw(groups))
        for name in draw(st.lists(names, unique=True, max_size=6))
    ]


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `make_plan` that it accepts."""
    num_groups = draw(st.integers(1, 3))
    optimizer = draw(st.none() | optimizers(num_groups))
    parameters = [_make_sparse(draw, spec, optimizer) for spec in draw(parameter_lists(num_groups))]
    taken = {spec.name for spec in parameters}
    buffer_names = names.filter(lambda name: name not in taken and ".block" not in name)
    return {
        "parameters": parameters,
        "num_pservers": draw(all_num_pservers),
        "min_block_size": draw(all_min_block_sizes),
        "placement": draw(placements),
        "slice_parameters": draw(st.booleans()),
        "buffers": [
            (name, draw(shapes), draw(st.sampled_from(sorted(DTYPE_BYTES))))
            for name in draw(st.lists(buffer_names, unique=True, max_size=2))
        ],
        "optimizer": optimizer,
    }


def _make_sparse(draw: st.DrawFn, spec: ParameterSpec, optimizer: OptimizerSpec | None) -> ParameterSpec:
    rule = "SGD" if optimizer is None else optimizer.rule(spec.group)
    is_sparse = rule == "SparseAdam" or (rule in SPARSE_NUMBERS and spec.shape != () and draw(st.booleans()))
    return replace(spec, is_sparse=True, shape=spec.shape or (1,)) if is_sparse else spec


plans = plan_arguments().map(lambda arguments: make_plan(**arguments))


def over_the_wire(plan: SlicePlan) -> Any:
    """A plan's JSON as the other side parses it."""
    return json.loads(json.dumps(plan.as_json))
