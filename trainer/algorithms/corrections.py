"""Behavior corrections, by name: what makes tokens of an older policy count for the present one.

Shape legend: T loss tokens. `w = exp(clamp(proximal − behavior, ±20))`, float32, no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.trainer.algorithms.policy_loss import clamped_exp
from penstock.trainer.config import AlgorithmConfig


class Correction(NamedTuple):
    """What multiplies each policy-loss term. Rejected tokens keep their place in the normaliser (I9).

    Attributes:
        factors: `[T] float32` ≥ 0, 0 where rejected; no gradient.
        is_masked: `[T] bool`, rejected.
    """

    factors: Tensor
    is_masked: Tensor


CorrectionFunction = Callable[[Tensor, Tensor], Correction]
"""(proximal, behavior), each `[T] float32` -> Correction."""


def no_correction(proximal: Tensor, behavior: Tensor) -> Correction:
    """Weight 1 everywhere: right only for on-policy tokens."""
    del behavior
    return Correction(torch.ones_like(proximal), torch.zeros_like(proximal, dtype=torch.bool))


def decoupled(proximal: Tensor, behavior: Tensor, cap: float) -> Correction:
    """Weight `w = exp(proximal − behavior)`; tokens with w > cap are masked. AReaL, arXiv 2505.24298.

    The loss clips around the proximal policy, the weight carries the step from behavior to proximal.
    """
    weights = clamped_exp((proximal - behavior).detach())
    is_masked = weights > cap
    return Correction(weights.masked_fill(is_masked, 0.0), is_masked)


def behavior_correction(config: AlgorithmConfig) -> CorrectionFunction:
    """The correction that `config.correction` names, with its settings bound."""
    corrections: dict[str, CorrectionFunction] = {
        "none": no_correction,
        "decoupled": partial(decoupled, cap=config.correction_cap),
    }
    return corrections[config.correction]
