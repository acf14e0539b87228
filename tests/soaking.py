"""Sampling of long campaigns and large matrices for CI; `make soak` runs all of them.

It selects the hypothesis profile "soak" and tests that are marked `soak`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

FACTOR = 20

settings.register_profile("soak", deadline=None, max_examples=FACTOR * settings.default.max_examples)


def is_soaking() -> bool:
    return settings.get_current_profile_name() == "soak"


def examples(sample: int) -> int:
    """Return the number of examples to run where CI runs `sample`."""
    return FACTOR * sample if is_soaking() else sample


def parametrize_sampled(
    names: str | Sequence[str], cases: Iterable[Any], sample: Sequence[Any], **options: Any
) -> pytest.MarkDecorator:
    """Parametrize with all cases, and mark with `soak` what is not in the sample."""
    cases = list(cases)
    assert all(case in cases for case in sample)
    parameters = [
        pytest.param(*((case,) if isinstance(names, str) else case), marks=[] if case in sample else pytest.mark.soak)
        for case in cases
    ]
    return pytest.mark.parametrize(names, parameters, **options)
