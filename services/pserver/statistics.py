"""Statistics of one block: a few passes over its values, in pieces, so that little memory is needed."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from ps_protocol.vocabulary import Round
from services.runtime.statistics import Statistics

PIECE = 1 << 16  # elements, which stay in the cache
NONFINITE = 255  # the exponent bits of float32 for NaN and infinity


def describe_values(values: Tensor, version: Round, before: Tensor | None = None) -> Statistics:
    """Return statistics of a flat float32 tensor, which is only read; `before` is its value before its newest update.

    Takes about 7 ns for each element, and 3 more with `before`.
    """
    parts = [_describe_piece(piece, version) for piece in torch.split(values, PIECE)]
    if before is not None:
        for now, then in zip(torch.split(values, PIECE), torch.split(before, PIECE), strict=True):
            update, old = _sum_finite_squares(now.double().sub_(then)), _sum_finite_squares(then.double())
            parts.append(Statistics(version=version, update_squares=update, before_squares=old))
    return reduce(Statistics.merge, parts)


def _describe_piece(piece: Tensor, version: Round) -> Statistics:
    signs_and_exponents = (piece.view(torch.int32) >> 23).bitwise_and_(2 * NONFINITE + 1)
    counts = dict(enumerate(torch.bincount(signs_and_exponents, minlength=512).tolist()))
    counts[0] += counts.pop(256)
    num_odd, num_nan, finite = counts.pop(NONFINITE) + counts.pop(256 + NONFINITE), 0, piece
    if num_odd:
        num_nan, finite = int(torch.isnan(piece).sum()), piece[torch.isfinite(piece)]
    low, high = map(float, torch.aminmax(finite)) if len(finite) else (math.inf, -math.inf)
    wide = finite.double()
    return Statistics(
        version=version,
        num_elements=len(piece),
        num_nan=num_nan,
        num_infinite=num_odd - num_nan,
        num_zero=len(piece) - int(torch.count_nonzero(piece)),
        minimum=low,
        maximum=high,
        total=float(wide.sum()),
        squares=_sum_squares(wide),
        counts={bits: count for bits, count in counts.items() if count},
    )


def _sum_finite_squares(piece: Tensor) -> float:
    """Return the sum of squares without NaN and infinity."""
    total = _sum_squares(piece)  # of float64, which squares of float32 do not overflow
    return total if math.isfinite(total) else _sum_squares(piece.nan_to_num(0.0, 0.0, 0.0))


def _sum_squares(piece: Tensor) -> float:
    return float(torch.dot(piece, piece))
