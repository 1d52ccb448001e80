"""The proximal policy, center of the trust region: logprobs p in the ratio ρ = exp(c − p).

Shape legend: T loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.trainer.algorithms.catalog import Entry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProximalInputs:
    """Inputs from which p is computed, all without gradient."""

    target: Tensor
    """`[T]` sg(c)."""
    behavior: Tensor
    """`[T]` b."""
    recomputed: Tensor | None = None
    """`[T]` by a forward at the start of the batch; None if there was none."""
    staleness: Tensor | None = None
    """`[T] int64`, v_prox − v_token: version at the start of the batch minus that of the token."""
    is_first_update: bool = True
    """Whether no optimizer step of this batch was taken yet."""


@Entry("proximal")
def target(inputs: ProximalInputs) -> Tensor:
    """`p = sg(c): ρ ≡ 1, clips do nothing`. Exact when a batch is one optimizer step."""
    return inputs.target


@Entry("proximal", source="2506.13585")
def behavior(inputs: ProximalInputs) -> Tensor:
    """`p = b: w ≡ 1, ρ is the whole correction`."""
    return inputs.behavior


@Entry("proximal", source="2110.00641")
def recompute(inputs: ProximalInputs) -> Tensor:
    """`p by a forward at the start of the step`. Decoupled PPO."""
    assert inputs.recomputed is not None, "recompute needs a forward at the start of the batch"
    return inputs.recomputed


@Entry("proximal", source="2512.06547")
def interpolate(inputs: ProximalInputs) -> Tensor:
    """`p = b + α(sg(c) − b), α = (v_prox − v_token) / (v_prox + 1 − v_token)`: no extra forward.

    α = 0 for tokens sampled at v_prox; the first update of a batch uses sg(c), which is p itself then.
    """
    if inputs.is_first_update:
        return inputs.target
    assert inputs.staleness is not None, "interpolate needs the version of every token"
    staleness = inputs.staleness.to(inputs.target.dtype)
    return inputs.behavior + staleness / (staleness + 1.0) * (inputs.target - inputs.behavior)
