"""The entropy bonus, and coefficients that follow a target: η of the bonus, β of the divergence from the reference.

    entropy   η ← clip(η + Δ, 0, η_max) if H < H*, else clip(η − Δ, 0, η_max);  applied where H ≤ H*, else 0
    kl        β ← β (1 + K clip(KL / KL* − 1, ±0.2))

H and KL are `loss/entropy` and `loss/reference_kl` of the last batch: means over all its loss tokens and all ranks, so
every rank computes the same coefficients. A step that was skipped, that trains only a critic, or that has no loss token
changes nothing.
Sources: entropy, Skywork-OR1, arXiv 2505.22312, adaptive entropy control (there H is of the batch itself, which takes
one more forward pass); divergence, Ziegler et al., arXiv 1909.08593, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from penstock.trainer.algorithms.catalog import Entry, Variant
from penstock.trainer.algorithms.conditions import Condition
from penstock.trainer.algorithms.kl import KlConfig

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.trainer.config import AlgorithmConfig

_MAX_KL_ERROR = 0.2
"""The relative error of the divergence is clipped to ± this."""


_HAS_TARGET = Condition(
    lambda config: config.entropy.target is not None,
    ("entropy.target",),
    "the coefficient is fixed",
    "Use algorithm.entropy.target, the entropy that it should keep",
)


class EntropyConfig(Variant):
    """Bonus for the entropy of the policy, which keeps it exploring."""

    coefficient: float = Field(default=0.0, ge=0, le=1)
    """η; with a target, the one of the first batch."""
    target: float | None = Field(default=None, gt=0)
    """H*: after every batch η rises by `step` if `loss/entropy` is below, nat per token, and else falls; a batch after
    one above it has no bonus. None keeps `coefficient`."""
    step: Annotated[float, _HAS_TARGET] = Field(default=1e-4, gt=0, le=1)
    """Δ: change of η per batch (Skywork-OR1's scripts: 0.0001)."""
    max_coefficient: Annotated[float, _HAS_TARGET] = Field(default=5e-3, gt=0, le=1)
    """η is at most this (Skywork-OR1's scripts: 0.005)."""


@Entry("entropy", source="1602.01783")
def entropy_bonus(entropies: Tensor, config: EntropyConfig) -> Tensor:
    """`−η H_t, H_t = −Σ_v π_v log π_v over what can be sampled; exact gradient`, `[T]`: a term of the loss.

    Args:
        entropies: `[T]` of the policy over the tokens that could be sampled, nats; its gradient is exact in every head.
        config: η.
    """
    return -config.coefficient * entropies


@Entry("controller", name="adaptive_entropy", source="2505.22312", level="batch")
def next_entropy_coefficient(coefficient: float, entropy: float, config: EntropyConfig) -> float:
    """`η ± Δ if H < H* or not, within [0, η_max]; no bonus while H > H*`; H is of the last batch, nat per token."""
    assert config.target is not None, "a fixed coefficient has no controller"
    change = config.step if entropy < config.target else -config.step
    return min(max(coefficient + change, 0.0), config.max_coefficient)


@Entry("controller", name="adaptive_kl", source="1909.08593", level="batch")
def next_kl_coefficient(coefficient: float, divergence: float, config: KlConfig) -> float:
    """`β (1 + K clip(KL / KL* − 1, ±0.2))`; KL is of the last batch, nat per token."""
    assert config.target is not None, "a fixed coefficient has no controller"
    error = min(max(divergence / config.target - 1.0, -_MAX_KL_ERROR), _MAX_KL_ERROR)
    return coefficient * (1.0 + config.gain * error)


class Controllers:
    """The algorithm with its coefficients of now.

    Attributes:
        state: What a checkpoint must hold to continue exactly: η, the last H, and β, of those that have a target, and
            the configured η and β that they began with.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.state: dict[str, float] = {}
        if config.entropy.target is not None:
            coefficient = config.entropy.coefficient
            self.state |= {"entropy_coefficient": coefficient, "entropy": 0.0, "entropy_began_with": coefficient}
        if config.kl.target is not None and config.kl.coefficient:
            self.state |= {"kl_coefficient": config.kl.coefficient, "kl_began_with": config.kl.coefficient}

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The configured algorithm, with the coefficients for the next batch."""
        entropy, kl = self._config.entropy, self._config.kl
        update: dict[str, EntropyConfig | KlConfig] = {}
        if entropy.target is not None:
            is_too_high = self.state["entropy"] > entropy.target
            coefficient = 0.0 if is_too_high else self.state["entropy_coefficient"]
            update["entropy"] = entropy.model_copy(update={"coefficient": coefficient})
        if "kl_coefficient" in self.state:
            update["kl"] = kl.model_copy(update={"coefficient": self.state["kl_coefficient"]})
        return self._config.model_copy(update=update) if update else self._config

    def metrics(self) -> dict[str, float]:
        """The coefficients for the next batch, of those that are used."""
        entropy, kl = self.algorithm.entropy, self.algorithm.kl
        metrics = {}
        if entropy.coefficient or entropy.target is not None:
            metrics["loss/entropy_coefficient"] = entropy.coefficient
        if "kl_coefficient" in self.state:
            metrics["loss/kl_coefficient"] = kl.coefficient
        return metrics

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Move the coefficients by the metrics of a batch, if it had loss tokens."""
        entropy, kl = self._config.entropy, self._config.kl
        if entropy.target is not None and (measured := metrics.get("loss/entropy")) is not None:
            self.state["entropy"] = measured
            self.state["entropy_coefficient"] = next_entropy_coefficient(
                self.state["entropy_coefficient"], measured, entropy
            )
        if "kl_coefficient" in self.state and (divergence := metrics.get("loss/reference_kl")) is not None:
            self.state["kl_coefficient"] = next_kl_coefficient(self.state["kl_coefficient"], divergence, kl)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; a controller that began with another coefficient begins again with this one."""
        for controller in ("entropy", "kl"):
            if (key := f"{controller}_began_with") in self.state and state.get(key) == self.state[key]:
                self.state |= {name: value for name, value in state.items() if name.startswith(controller)}
