"""Inputs and results of the policy losses, the corrections and the objective, for one micro-batch.

Shape legend: T loss tokens, flat over the S sequences of the micro-batch (a sequence is never split), P pairs.
Natural logs; float32 in training, float64 in tests. Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp: e^20 is 5e8, far beyond any trust region and safe in float32."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The tokens of one micro-batch. Gradient flows through `target` (or `values`) alone."""

    target: Tensor
    """`[T]` c, log-probability under the trained policy."""
    proximal: Tensor
    """`[T]` p, centre of the trust region."""
    behavior: Tensor
    """`[T]` b, as recorded when the token was sampled."""
    reference: Tensor
    """`[T]` r, of the frozen reference; arbitrary if there is none."""
    advantages: Tensor
    """`[T]` A."""
    segments: Tensor
    """`[T] int64`, which of the S sequences each token belongs to."""
    num_segments: int
    """S; a sequence may have no token here."""
    pairs: Tensor
    """`[P, 2] int64`, segments (preferred, other)."""
    teacher: Tensor | None = None
    """`[T]` log-probability under a teacher."""
    values: Tensor | None = None
    """`[T]` V of a critic, with gradient."""
    old_values: Tensor | None = None
    """`[T]` V when the tokens were sampled."""
    returns: Tensor | None = None
    """`[T]` targets of V."""
    selected: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of the function of a loss or correction of the whole batch -> `[T] bool`, its tokens."""
    nll_factors: Tensor | None = None
    """`[T]` of `negative_logprob`; None: 0."""

    def selection(self, name: str) -> Tensor:
        """`[T] bool`: the tokens that were selected under this name; none in an empty micro-batch."""
        return self.selected.get(name, nowhere(self.segments))

    def segment_sum(self, per_token: Tensor) -> Tensor:
        """`[T] -> [S]`: Σ over the tokens of each sequence; 0 where there is none."""
        return per_token.new_zeros(self.num_segments).index_add(0, self.segments, per_token)

    def segment_mean(self, per_token: Tensor) -> Tensor:
        """`[T] -> [S]`: mean over the tokens of each sequence; 0 where there is none."""
        ones = per_token.new_ones(per_token.shape)
        return self.segment_sum(per_token) / self.segment_sum(ones).clamp(min=1.0)

    def spread(self, per_segment: Tensor) -> Tensor:
        """`[S] -> [T]`: every token gets the value of its sequence."""
        return per_segment.index_select(0, self.segments)


class PolicyLoss(NamedTuple):
    """Loss terms of tokens, before correction and aggregation; a sequence's are repeated at each of its tokens."""

    terms: Tensor
    """`[T]`, to be minimised; carries the gradient."""
    is_clipped_low: Tensor
    """`[T] bool`, a bound below 1 took the gradient away (or, in cispo, changed its weight)."""
    is_clipped_high: Tensor
    """`[T] bool`, likewise above 1."""
    measured: Mapping[str, Tensor] = MappingProxyType({})
    """Name -> `[T]`, of the metrics that the loss's entry declares; their means over tokens are reported."""


class LossTerms(NamedTuple):
    """Per loss token of one micro-batch, `[T]`."""

    terms: Tensor
    """To be summed with the token weights; they carry the gradient."""
    is_masked: Tensor
    """Rejected by a behavior correction."""
    is_clipped_low: Tensor
    """A lower bound of the loss acted."""
    is_clipped_high: Tensor
    """An upper bound did."""
    left: Tensor
    """What the corrections left of each token, by which `correction.renormalize` divides: 1 or the weight, and 0 where
    masked."""
    left_of_sequences: Tensor
    """The part of it that all tokens of a sequence share."""
    unit_shares: Tensor
    """What a token is of one unit of the aggregation's mean: 1 / n_i if it sums over the tokens of a sequence, else 1.
    """
    measured: Mapping[str, Tensor] = MappingProxyType({})
    """As in `PolicyLoss`."""


def unclipped(terms: Tensor, measured: Mapping[str, Tensor] = MappingProxyType({})) -> PolicyLoss:
    """A loss without bounds."""
    none = nowhere(terms)
    return PolicyLoss(terms, none, none, measured)


def nowhere(per_token: Tensor) -> Tensor:
    """`[T] bool`: False at every token."""
    return per_token.detach().new_zeros(per_token.shape).bool()


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of a log-ratio clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class BatchTokens(NamedTuple):
    """`[T] float64` p, b and A of all loss tokens of a batch, at its start. All ranks draw with the same `seed`."""

    proximal: NDArray[np.float64]
    behavior: NDArray[np.float64]
    advantages: NDArray[np.float64]
    seed: int

    @property
    def covariances(self) -> NDArray[np.float64]:
        """`[T]`: `(A − mean A)(p − mean p)`, over the batch. A policy gradient lowers the entropy where it is large."""
        return (self.advantages - self.advantages.mean()) * (self.proximal - self.proximal.mean())
