"""Who has a version gets what is newer, and nothing twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.frames import parse_frame
from ps_protocol.routes import SINCE_KEY
from services.pserver.reply import LARGE_BYTES, VersionedBlocks

SIZES = {"small": 3, "large": LARGE_BYTES // 4 + 1, "other": 5, "larger": LARGE_BYTES}


def make(changed: dict[str, int]) -> tuple[VersionedBlocks, dict[str, bytes]]:
    data = {name: torch.randn(size).numpy().tobytes() for name, size in SIZES.items()}
    blocks = [((name, "F32", (size,)), memoryview(data[name])) for name, size in SIZES.items()]
    return VersionedBlocks(blocks, changed, {"round": "9"}, 8), data


@given(
    changed=st.fixed_dictionaries(dict.fromkeys(SIZES, st.integers(0, 9))),
    asked=st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=6),
)
def test_a_frame_holds_exactly_what_is_newer(changed: dict[str, int], asked: list[int | None]) -> None:
    versioned, data = make(changed)
    for have in asked:
        body = b"".join(versioned.parts(have))
        frame = parse_frame(body)
        held = {
            entry.name: body[frame.data_begin + entry.begin : frame.data_begin + entry.end] for entry in frame.tensors
        }
        newer = {name for name in SIZES if have is None or changed[name] > have}
        assert held == {name: data[name] for name in newer}
        assert frame.metadata.get(SINCE_KEY) == (None if newer == SIZES.keys() else str(have))
        assert frame.metadata["round"] == "9"


def test_large_blocks_are_sent_from_where_they_lie() -> None:
    versioned, _ = make(dict.fromkeys(SIZES, 1))
    assert [isinstance(part, memoryview) for part in versioned.parts()] == [False, True, False, True]


def test_strangers_cannot_make_it_keep_frames() -> None:
    versioned, _ = make({**dict.fromkeys(SIZES, 1), "small": 9})
    for have in (*range(1, 8), *range(9, 20)):
        assert versioned.parts(have) is not versioned.parts(have)
    assert versioned.parts(8) is versioned.parts(8)


def test_a_difference_is_for_who_has_the_round_before() -> None:
    data = {name: bytes(4 * size) for name, size in SIZES.items()}
    blocks = [((name, "F32", (size,)), data[name]) for name, size in SIZES.items()]
    difference = [
        (("large", "I8", (SIZES["large"],)), bytes(SIZES["large"])),
        (("large.scales", "F32", (1,)), bytes(4)),
    ]
    changed = {"small": 9, "large": 9, "other": 8, "larger": 3}
    versioned = VersionedBlocks(blocks, changed, {"round": "9"}, 8, {"large": difference})

    def tensors(have: int | None) -> list[tuple[str, str]]:
        return [(entry.name, entry.dtype) for entry in parse_frame(b"".join(versioned.parts(have))).tensors]

    assert tensors(8) == [("small", "F32"), ("large", "I8"), ("large.scales", "F32")]
    assert tensors(7) == [("small", "F32"), ("large", "F32"), ("other", "F32")]
    assert tensors(9) == []
    assert tensors(None) == [(name, "F32") for name in SIZES]


def test_a_frame_of_differences_says_to_what_though_all_blocks_are_in_it() -> None:
    blocks = [(("w", "F32", (3,)), bytes(12))]
    difference = {"w": [(("w", "I8", (3,)), bytes(3)), (("w.scales", "F32", (1,)), bytes(4))]}
    versioned = VersionedBlocks(blocks, {"w": 5}, {}, 4, difference)
    assert parse_frame(b"".join(versioned.parts(4))).metadata == {SINCE_KEY: "4"}
    assert SINCE_KEY not in parse_frame(b"".join(versioned.parts(3))).metadata
