"""Pairs of wire types, for gradients and for parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """The wire types of a run."""

    push: str
    pull: str

    def __str__(self) -> str:
        return f"{self.push} / {self.pull}"


FLOAT32 = Pair("float32", "float32")
EIGHT_BITS = Pair("int8", "int8")  # of the targets

PAIRS = (
    FLOAT32,
    Pair("bfloat16", "bfloat16"),
    Pair("float16", "float16"),
    Pair("int8", "bfloat16"),
    EIGHT_BITS,
    Pair("topk", "float32"),
    Pair("topk", "int8"),
)


def parse_pair(text: str) -> Pair:
    """Return the pair with this name.

    >>> parse_pair("int8/bfloat16")
    Pair(push='int8', pull='bfloat16')
    """
    push, _, pull = text.partition("/")
    return Pair(push.strip(), pull.strip())
