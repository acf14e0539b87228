from __future__ import annotations

import contextlib
import inspect
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import GradpostError
from ps_protocol.optimizers import (
    LOWEST_RANK,
    MEAN,
    REFUSED,
    RULES,
    OptimizerSpec,
    check_hyper_parameters,
    check_optimizer,
    check_sparse_numbers,
)

from ...raising import raises_code
from .strategies import few, json_values, optimizers

SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
ADAM = check_optimizer("Adam", [{"amsgrad": False, "maximize": False, "decoupled_weight_decay": False}])
SGD_NUMBERS = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.0}
ADAM_NUMBERS = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}


def test_optimizers_have_the_arguments_of_torch() -> None:
    """Names, numbers and flags are those of the constructors, less what selects an implementation."""
    torch_optim = pytest.importorskip("torch.optim")
    others = {"self", "params", "foreach", "capturable", "differentiable", "fused"}
    for name, rule in RULES.items():
        signature = inspect.signature(getattr(torch_optim, name).__init__).parameters
        defaults = {key: signature[key].default for key in signature.keys() - others}
        if name == "AdamW":
            defaults["decoupled_weight_decay"] = True  # what makes it AdamW: in its groups, not in its signature
        assert set(rule.flags) == {key for key, value in defaults.items() if isinstance(value, bool)}, name
        assert set(rule.numbers) == defaults.keys() - set(rule.flags), name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_optimizer_is_refused_with_its_reason(name: str) -> None:
    with raises_code("unsupported_optimizer") as caught:
        check_optimizer(name, [])
    reason, _, advice = caught.value.detail.partition("; ")
    assert reason == f"{name} cannot run on a pserver: {REFUSED[name]}"
    assert ("--strategy ring runs it" in advice) == (name != "LBFGS")
    assert caught.value.facts == {"expected": ", ".join(RULES), "actual": name}


FLAGS = {"nesterov": False, "maximize": False}
OF_BOTH = [*ADAM.group_flags, *SGD.group_flags]
FLAGS_OF_SGD = r"the flags of group 1 must be those of SGD .*nesterov, maximize"


@pytest.mark.parametrize(
    ("name", "flags", "members", "message"),
    [
        ("Lion", [], None, "Lion cannot run on a pserver: it is not on the list"),
        ("SGD", [FLAGS, {}], None, FLAGS_OF_SGD),
        ("SGD", [FLAGS, {"nesterov": False}], None, FLAGS_OF_SGD),
        ("SGD", [FLAGS, {**FLAGS, "fused": True}], None, FLAGS_OF_SGD),
        ("Adam+SGD", OF_BOTH, [["D", "Adam", 1]], "different names, its class names and all of its groups"),
        ("Adam+SGD", OF_BOTH, [["D", "Adam", 1], ["D", "SGD", 1]], "must have different names"),
        ("Adam+SGD", OF_BOTH, [["D", "SGD", 1], ["G", "Adam", 1]], "must have different names, its class names"),
        ("Adam+SGD", OF_BOTH, [["D", "Adam", 2], ["G", "SGD", 1]], "all of its groups"),
        (
            "Adam+SGD",
            ADAM.group_flags * 2,
            [["D", "Adam", 1], ["G", "SGD", 1]],
            "flags of group 1 must be those of SGD",
        ),
        ("Adam+Muon", [*ADAM.group_flags, {}], [["D", "Adam", 1], ["G", "Muon", 1]], "Muon cannot run on a pserver"),
    ],
    ids=str,
)
def test_an_optimizer_with_other_flags_or_members_is_refused(name: str, flags: Any, members: Any, message: str) -> None:
    with raises_code("unsupported_optimizer", match=message):
        check_optimizer(name, flags, members)


@few
@given(optimizers(2))
def test_a_spec_survives_the_wire(spec: OptimizerSpec) -> None:
    sent = json.loads(json.dumps(spec.to_json()))
    assert OptimizerSpec.from_json(sent) == spec


def test_several_optimizers_survive_the_wire() -> None:
    spec = OptimizerSpec.combine({"D": ADAM, "G": SGD}).with_buffers((MEAN,))
    assert OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert [(spec.rule(group), spec.find_member(group)) for group in range(3)] == [
        ("Adam", "D"), ("SGD", "G"), (MEAN, None),
    ]  # fmt: skip
    assert (spec.member("D"), spec.member("G"), list(spec.groups_of("G"))) == (ADAM, SGD, [1])
    groups = [ADAM_NUMBERS, SGD_NUMBERS, {"lr": 0.5}]
    assert check_hyper_parameters(spec, groups) == groups
    with raises_code("bad_hyper_parameters", match=r"group 0 of Adam\+SGD must have exactly"):
        check_hyper_parameters(spec, [SGD_NUMBERS, ADAM_NUMBERS, {"lr": 0.5}])
    with raises_code("invalid_message", match="no optimizer 'E' .*expected D, G"):
        spec.groups_of("E")


def test_valid_hyperparameters_are_accepted() -> None:
    assert check_hyper_parameters(SGD, [SGD_NUMBERS]) == [SGD_NUMBERS]
    assert check_hyper_parameters(ADAM, [ADAM_NUMBERS]) == [ADAM_NUMBERS]
    assert check_hyper_parameters(SGD, [{**SGD_NUMBERS, "dampening": -1.5}])


@pytest.mark.parametrize(
    "value", [-0.1, float("nan"), float("inf"), None, "0.1", True, [0.1], 10**400, -(10**400)], ids=ascii
)
def test_a_number_is_finite_and_not_negative(value: Any) -> None:
    with raises_code("bad_hyper_parameters", match=r"lr of group 0 is invalid .*a finite number of at least 0"):
        check_hyper_parameters(SGD, [{**SGD_NUMBERS, "lr": value}])


@pytest.mark.parametrize(
    "value", [0.9, [0.9], [0.9, 0.9, 0.9], [0.9, 1], [-0.1, 0.9], [0.9, True], "ab", [float("nan"), 0.9]]
)
def test_betas_are_two_fractions(value: Any) -> None:
    with raises_code("bad_hyper_parameters", match="betas of group 0 is invalid"):
        check_hyper_parameters(ADAM, [{**ADAM_NUMBERS, "betas": value}])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "a list with one object for each parameter group .*expected 1 groups; actual None"),
        ([], "expected 1 groups; actual 0 groups"),
        ([SGD_NUMBERS, SGD_NUMBERS], "expected 1 groups; actual 2 groups"),
        ([None], "group 0 of SGD must have exactly the expected hyperparameters .*actual NoneType"),
        ([{"lr": 0.1}], "expected lr, momentum, dampening, weight_decay; actual lr"),
        ([{**SGD_NUMBERS, "eps": 0.1}], "group 0 of SGD must have exactly the expected hyperparameters"),
    ],
)
def test_groups_that_do_not_fit(groups: Any, message: str) -> None:
    with raises_code("bad_hyper_parameters", match=message):
        check_hyper_parameters(SGD, groups)


@pytest.mark.parametrize("name", ["momentum", "weight_decay"])
def test_numbers_that_change_rows_without_a_gradient_must_be_0_for_sparse_parameters(name: str) -> None:
    groups = [SGD_NUMBERS, {**SGD_NUMBERS, "momentum": 0, name: 0.5}]
    both = OptimizerSpec("SGD", SGD.group_flags * 2)
    check_sparse_numbers(both, (), groups)
    with raises_code("bad_hyper_parameters", match=f"SGD with {name} cannot .*sparse=False .*0 in group 1; actual 0.5"):
        check_sparse_numbers(both, {1}, groups)


def test_the_last_groups_may_be_the_buffers() -> None:
    spec = SGD.with_buffers((MEAN,))
    assert check_optimizer("SGD", spec.group_flags) == spec
    assert ([spec.rule(group) for group in range(2)], spec.num_stepped) == (["SGD", MEAN], 1)
    assert check_hyper_parameters(spec, [SGD_NUMBERS, {"lr": 0.5}]) == [SGD_NUMBERS, {"lr": 0.5}]
    with raises_code(
        "bad_hyper_parameters", match=r"group 1 of SGD must have exactly the expected hyperparameters .*expected lr; "
    ):
        check_hyper_parameters(spec, [SGD_NUMBERS, SGD_NUMBERS])
    both = SGD.with_buffers((MEAN, LOWEST_RANK))
    assert check_optimizer("SGD", both.group_flags) == both
    assert ([both.rule(group) for group in range(3)], both.num_stepped) == (["SGD", MEAN, LOWEST_RANK], 1)
    swapped = SGD.with_buffers((LOWEST_RANK, MEAN)).group_flags
    for groups in ([*spec.group_flags[::-1]], [{MEAN: False}], [*SGD.group_flags, {MEAN: 1}], swapped):
        with raises_code("unsupported_optimizer"):
            check_optimizer("SGD", groups)


@few
@given(json_values | st.lists(st.dictionaries(st.sampled_from(sorted(SGD_NUMBERS)), json_values)))
def test_any_json_gives_numbers_or_our_error(value: Any) -> None:
    with contextlib.suppress(GradpostError):
        check_hyper_parameters(SGD, value)
