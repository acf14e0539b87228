"""Random numbers of a script: seeded before each step, drawn after it, whatever happened meanwhile."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_draws(seed: int, step: int) -> None:
    """Seed the global generators of Python, numpy and torch for a step."""
    number = seed * 1_000_003 + step
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def draw() -> list[float]:
    """Draw a number from each global generator."""
    return [random.random(), np.random.random(), torch.rand(1).item()]
