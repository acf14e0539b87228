from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import PARAMETER_DTYPES, PLACEMENTS, WINDOW, ParameterSpec
from services.coordinator.defaults import RECORD_BYTES
from services.pserver.layout import ShardLayout
from tests.unit.coordinator.support import defaults


def test_the_example_of_the_docstring():
    layout = ShardLayout(make_plan([ParameterSpec("w", (150,))], 2, min_block_size=1), 1)
    place = layout.place["w.block1"]
    assert (place.begin, place.end) == (75 - 64, 75 - 64 + 75)  # its own window starts at offset 0
    assert (place.step_begin, place.step_end, place.padded_end) == (0, 150 - 64, 128)

    place = ShardLayout(make_plan([ParameterSpec("w", (150,))], 2, min_block_size=1), 0).place["w.block0"]
    assert (place.begin, place.end, place.step_begin, place.step_end, place.padded_end) == (0, 75, 0, 128, 128)


def test_groups_lie_together_and_plan_order_is_kept_within_them():
    parameters = [ParameterSpec(name, (64,), group=group) for name, group in (("a", 1), ("b", 0), ("c", 1), ("d", 0))]
    layout = ShardLayout(make_plan(parameters, 1), 0)
    assert [(p.name, p.group, p.begin) for p in layout.places] == [
        ("b.block0", 0, 0), ("d.block0", 0, 64), ("a.block0", 1, 128), ("c.block0", 1, 192),
    ]  # fmt: skip
    assert list(layout.place) == ["a.block0", "b.block0", "c.block0", "d.block0"]


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=50), num_pservers=st.integers(1, 3))
def test_the_coordinator_counts_the_padding_of_blocks_when_it_bounds_the_log(sizes, num_pservers):
    parameters = [ParameterSpec(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    plan = make_plan(parameters, num_pservers, min_block_size=10)
    largest = max(ShardLayout(plan, index).num_elements for index in range(num_pservers))
    interval = defaults(durability="log", max_log_bytes=1 << 20).checkpoint_interval(plan)
    assert interval == (1 << 20) // (4 * largest + RECORD_BYTES)


def test_a_shard_without_blocks_has_no_elements():
    layout = ShardLayout(make_plan([ParameterSpec("w", (10,))], 2), 1)
    assert (layout.num_elements, layout.places, layout.place) == (0, (), {})


@given(
    sizes=st.lists(st.integers(0, 500), max_size=6),
    groups=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    dtypes=st.lists(st.sampled_from(PARAMETER_DTYPES), min_size=6, max_size=6),
    num_pservers=st.integers(1, 5),
    min_block_size=st.integers(1, 200),
    placement=st.sampled_from(PLACEMENTS),
)
def test_every_element_keeps_its_place_in_its_window(sizes, groups, dtypes, num_pservers, min_block_size, placement):
    parameters = [
        ParameterSpec(f"p{i}", (size,), dtypes[i], groups[i]) for i, size in enumerate(sizes)
    ]  # fmt: skip
    plan = make_plan(parameters, num_pservers, min_block_size=min_block_size, placement=placement)
    for pserver in range(num_pservers):
        layout = ShardLayout(plan, pserver)
        assert list(layout.place) == [block.name for block in plan.shards[pserver]]
        assert set(layout.places) == set(layout.place.values())
        at = 0
        for place in layout.places:
            block, parameter = place.block, plan.parameter[place.block.parameter]
            assert (place.name, place.group, place.dtype) == (block.name, parameter.group, parameter.dtype)
            assert place.end - place.begin == block.num_elements
            # the flat tensor is tiled by whole windows
            assert place.step_begin == at
            assert place.step_begin % WINDOW == place.padded_end % WINDOW == 0
            at = place.padded_end
            # the block lies within its windows, each element where it lies in its parameter's window
            assert place.begin % WINDOW == block.begin % WINDOW
            assert place.step_begin <= place.begin < place.step_begin + WINDOW
            assert place.padded_end == place.end + -place.end % WINDOW
            # windows are stepped whole, but not beyond the parameter's end
            stepped_to = place.step_end - place.begin + block.begin  # in elements of the parameter
            assert stepped_to == min(block.end + -block.end % WINDOW, parameter.num_elements)
        assert layout.num_elements == at
    assert [p.group for p in layout.places] == sorted(p.group for p in layout.places)
