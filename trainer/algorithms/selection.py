"""Tokens that a loss or a correction selects by comparing all loss tokens of a batch. Numpy, float64.

Every rank has the whole batch here, before the first gradient, so the selection is the same however the batch is split
into ranks, mini-batches, micro-batches and rows (I9). The logprobs of the policy are those at the start of the batch, p
of `proximal=recompute`. Tokens are selected by their numbers, so the order of the batch does not matter; of tokens that
are equal in all of them, `kl_cov` selects the last ones.

Shape legend: T loss tokens of the batch, n_i of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.algorithms.advantages import with_teacher
from penstock.trainer.algorithms.config import ClipCovConfig, KlCovConfig, M2poConfig
from penstock.trainer.algorithms.rules import entries_of_batch
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.config import AlgorithmConfig


class BatchTokens(NamedTuple):
    """All loss tokens of a batch.

    Attributes:
        proximal: `[T] float64` p.
        behavior: `[T] float64` b.
        advantages: `[T] float64` A.
        seed: Of what is drawn; the same on every rank.
    """

    proximal: NDArray[np.float64]
    behavior: NDArray[np.float64]
    advantages: NDArray[np.float64]
    seed: int

    @property
    def covariances(self) -> NDArray[np.float64]:
        """`[T]`: `(A − mean A)(p − mean p)`, over the batch. A policy gradient lowers the entropy where it is large."""
        return (self.advantages - self.advantages.mean()) * (self.proximal - self.proximal.mean())


def m2po(tokens: BatchTokens, config: M2poConfig) -> NDArray[np.bool_]:
    """`[T]`: of the tokens with A (p − b) > 0, those of largest (p − b)², until the mean of the others is at most τ.

    Only these tokens are moved further from the behavior policy by their advantage, and the mean is over them, as in
    the authors' code (AReaL has it over all loss tokens). Tokens equal to the last one are masked with it. M2PO, arXiv
    2510.01161, algorithm 1, with τ = 0.04. The authors' code clips instead of masking, and never within ratios of 0.7
    to 1.5.
    """
    log_weights = tokens.proximal - tokens.behavior
    moves_away = tokens.advantages * log_weights > 0
    ascending = np.sort(log_weights[moves_away] ** 2)
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)
    num_kept = int((means <= config.max_second_moment).sum())
    limit = ascending[num_kept] if num_kept < len(ascending) else np.inf
    return moves_away & (log_weights**2 >= limit)


def clip_cov(tokens: BatchTokens, config: ClipCovConfig) -> NDArray[np.bool_]:
    """`[T]`: a share of T, drawn from the tokens whose covariance is between the bounds. Clip-Cov, arXiv 2505.22617."""
    covariances = tokens.covariances
    candidates = np.flatnonzero((covariances > config.min_covariance) & (covariances < config.max_covariance))
    candidates = candidates[np.argsort(covariances[candidates])]  # drawn by rank, not by their place in the batch
    num_drawn = min(_num_of(config.share, covariances), len(candidates))
    drawn = np.zeros(len(covariances), dtype=bool)
    drawn[np.random.default_rng(tokens.seed).choice(candidates, num_drawn, replace=False)] = True
    return drawn


def kl_cov(tokens: BatchTokens, config: KlCovConfig) -> NDArray[np.bool_]:
    """`[T]`: a share of T, at least one: the tokens of largest covariance. KL-Cov, arXiv 2505.22617.

    Of equal covariances those of the larger advantage are selected, then of the larger behavior logprob.
    """
    ascending = np.lexsort((tokens.behavior, tokens.advantages, tokens.covariances))
    held = np.zeros(len(ascending), dtype=bool)
    held[ascending[-_num_of(config.share, ascending) :]] = True
    return held


def _num_of(share: float, values: NDArray[Any]) -> int:
    return max(1, int(share * len(values)))


SELECTIONS: dict[str, Callable[[BatchTokens, Any], NDArray[np.bool_]]] = {
    "m2po": m2po,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
"""Name in the catalog of a loss or correction of level `batch` -> its selection."""


def select(sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, seed: int) -> list[TrainingSequence]:
    """Mark the tokens of the batch that the algorithm's loss and corrections select.

    Args:
        sequences: All of the batch, with proximal logprobs.
        algorithm: What selects.
        seed: Of what is drawn; the policy version.
    """
    selecting = entries_of_batch(algorithm)
    if not selecting:
        return list(sequences)

    def column(name: str) -> NDArray[np.float64]:
        """`[T]`; 0 where a sequence has none."""
        columns = [(getattr(one, name), len(one.targets)) for one in sequences]
        return np.concatenate([np.zeros(count) if one is None else one.astype(np.float64) for one, count in columns])

    proximal, advantages = column("proximal_logprobs"), column("advantages")
    if coefficient := algorithm.teacher_coefficient:
        advantages = with_teacher(advantages, column("teacher_logprobs"), proximal, coefficient)
    tokens = BatchTokens(proximal, column("behavior_logprobs"), advantages, seed)
    ends = np.cumsum([len(one.targets) for one in sequences])[:-1]
    marked = list(sequences)
    for entry in selecting if len(proximal) else ():
        settings = algorithm.loss if entry.kind == "loss" else algorithm.correction.chain[entry.name]
        chosen = np.split(SELECTIONS[entry.name](tokens, settings), ends)
        marked = [
            replace(one, selected={**one.selected, entry.name: mask}) for one, mask in zip(marked, chosen, strict=True)
        ]
    return marked
