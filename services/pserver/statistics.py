"""Statistics of one block: a few passes over its values, in pieces, so that little memory is needed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ps_protocol.vocabulary import Round
from services.runtime.statistics import MAX_BINS, Histogram, Statistics

PIECE = 1 << 16  # elements, which stay in the cache
MIN_EXPONENT = -149  # of the smallest float32 above zero


def describe_values(values: Tensor, version: Round, before: Tensor | None = None) -> Statistics:
    """Return statistics of a flat float32 tensor, which is only read; `before` is its value before its newest update.

    Takes about 4 ns for each element, and 2 more with `before`.
    """
    total = Statistics(version=version, num_elements=0)
    for at in range(0, len(values), PIECE):
        total = total.merge(_describe_piece(values[at : at + PIECE], version))
    if before is None:
        return total
    pairs = [(values[at : at + PIECE], before[at : at + PIECE]) for at in range(0, len(values), PIECE)]
    return total.model_copy(
        update={
            "update_squares": sum(_sum_finite_squares(now.double().sub_(then)) for now, then in pairs),
            "before_squares": sum(_sum_finite_squares(then.double()) for _, then in pairs),
        }
    )


def _sum_finite_squares(piece: Tensor) -> float:
    """Return the sum of squares without NaN and infinity: in JSON, NaN would be null, which means no update."""
    total = _sum_squares(piece)  # of float64, which squares of float32 do not overflow
    return total if math.isfinite(total) else _sum_squares(piece.nan_to_num(0.0, 0.0, 0.0))


def _sum_squares(piece: Tensor) -> float:
    return float(torch.dot(piece, piece))


def _describe_piece(piece: Tensor, version: Round) -> Statistics:
    low, high = (float(bound) for bound in torch.aminmax(piece))  # NaN if there is one
    finite = piece if math.isfinite(low) and math.isfinite(high) else piece[torch.isfinite(piece)]
    num_nan = 0 if finite is piece else int(torch.isnan(piece).sum())
    counted = Statistics(
        version=version,
        num_elements=len(piece),
        num_nan=num_nan,
        num_infinite=len(piece) - len(finite) - num_nan,
        num_zero=len(piece) - int(torch.count_nonzero(piece)),
    )
    if not len(finite):
        return counted
    if finite is not piece:
        low, high = (float(bound) for bound in torch.aminmax(finite))
    wide = finite.double()
    histogram, squares, mean = _count(finite, low, high), _sum_squares(wide), float(wide.mean())
    return counted.model_copy(
        update={
            "minimum": low,
            "maximum": high,
            "mean": mean,
            "deviations": _sum_squares(wide.sub_(mean)),
            "squares": squares,
            "histogram": histogram,
        }
    )


def _count(values: Tensor, low: float, high: float) -> Histogram:
    exponent = choose_exponent(low, high)
    first = math.floor(math.ldexp(low, -exponent))
    # float32 times a power of two is exact, unless it underflows, which takes wide bins, or that power has no float32.
    exact = values if -127 <= exponent <= 0 else values.double()
    bins = (exact * math.ldexp(1.0, -exponent)).floor_().sub_(first).int()
    return Histogram(exponent=exponent, first=first, counts=tuple(torch.bincount(bins).tolist()))


def choose_exponent(low: float, high: float) -> int:
    """Return the exponent of the narrowest bins of which `MAX_BINS` contain all values and tell neighbours apart.

    >>> choose_exponent(-1.0, 1.0), choose_exponent(3.0, 3.0), choose_exponent(0.0, 0.0)
    (-4, -5, -149)
    """
    spread, size = high - low, max(abs(low), abs(high))
    # A lone value in bins of a sixty-fourth of it: narrower ones could have numbers beyond 63 bits.
    smallest = max(MIN_EXPONENT, math.frexp(size)[1] - 1 - 6 if size else MIN_EXPONENT)
    exponent = max(smallest, math.frexp(spread / MAX_BINS)[1] - 1 if spread else smallest)
    while math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent)) >= MAX_BINS:
        exponent += 1
    return exponent
