"""The optimizer steps of a batch: which sequences each trains, with which weights, and which have a gradient.

Normalisers are those of the whole optimizer step, before any split into ranks or micro-batches (I9).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.dataflow.errors import TrainingError
from penstock.trainer.algorithms import aggregation
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.batches.packing import TrainingSequence


def mini_batches(
    sequences: Sequence[TrainingSequence], num_groups: int, algorithm: Algorithm, max_new_tokens: int, version: int
) -> Iterator[list[TrainingSequence]]:
    """The sequences of every optimizer step of a batch: `epochs` times all groups, in `mini_batches` equal shares.

    Advantages are those of the whole batch, normalisers those of the mini-batch. Groups of short answers arrive first,
    so groups are shuffled, by version and epoch: in the same way on every rank. A share may be empty: of groups whose
    answers were all cut off and are dropped.

    Raises:
        TrainingError: If there are fewer groups than mini-batches.
    """
    num_shares, epochs = algorithm.config.mini_batches, algorithm.config.epochs
    if num_shares * epochs == 1:
        yield list(sequences)
        return
    if num_groups < num_shares:
        raise TrainingError(
            f"trainer: a batch of {num_groups} groups for algorithm.mini_batches={num_shares}: some would be empty. "
            "Use fewer mini-batches or larger batches."
        )
    for epoch in range(epochs):
        shuffled = np.random.default_rng([version, epoch]).permutation(num_groups)
        for chosen in np.array_split(shuffled, num_shares):
            of_share = set(chosen.tolist())
            kept = [index for index, one in enumerate(sequences) if one.group in of_share]
            # Pairs are within a group, so both members are in the mini-batch.
            position_of = {index: position for position, index in enumerate(kept)}
            share = [
                replace(
                    sequences[index], preferred_to=tuple(position_of[worse] for worse in sequences[index].preferred_to)
                )
                for index in kept
            ]
            yield weigh(share, algorithm, max_new_tokens, None)


def weigh(
    sequences: Sequence[TrainingSequence], algorithm: Algorithm, max_new_tokens: int, normaliser: float | None
) -> list[TrainingSequence]:
    """Set the token weights, and the factors that make them those of the mean of `nll_coefficient`."""
    total = max(batch_normaliser(sequences, algorithm), 1.0) if normaliser is None else normaliser
    weights = aggregation.token_weights(_lengths(sequences), algorithm.aggregation, max_new_tokens, total)
    weighed = [replace(one, token_weight=float(weight)) for one, weight in zip(sequences, weights, strict=True)]
    if not algorithm.config.nll_coefficient:
        return weighed
    if algorithm.compares_pairs:
        return [replace(one, nll_factor=float(len(one.preferred_to))) for one in weighed]
    num_tokens = sum(len(one.targets) for one in weighed if one.is_imitated)
    return [
        replace(one, nll_factor=1.0 / (num_tokens * one.token_weight)) if one.is_imitated and len(one.targets) else one
        for one in weighed
    ]


def batch_normaliser(sequences: Sequence[TrainingSequence], algorithm: Algorithm) -> float:
    """Divisor of the weights of a batch; the sum of the normalisers of its parts."""
    if algorithm.compares_pairs:
        return float(sum(len(sequence.preferred_to) for sequence in sequences))
    return aggregation.batch_normaliser(_lengths(sequences), algorithm.aggregation)


def _lengths(sequences: Sequence[TrainingSequence]) -> aggregation.Lengths:
    counts = np.array([len(sequence.targets) for sequence in sequences], dtype=np.int64)
    return aggregation.Lengths(counts, np.array([sequence.group for sequence in sequences], dtype=np.int64))


def split_by_signal(
    sequences: Sequence[TrainingSequence], algorithm: Algorithm
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """Sequences of groups with a signal (`has_signal`), then those of all others, whose gradient is 0.

    A loss of pairs trains the sequences of pairs only, so there is nothing to split.
    """
    if algorithm.compares_pairs:
        return (list(sequences), []) if has_signal(sequences, algorithm) else ([], list(sequences))
    groups: dict[int, list[TrainingSequence]] = {}
    for one in sequences:
        groups.setdefault(one.group, []).append(one)
    heard: list[TrainingSequence] = []
    silent: list[TrainingSequence] = []
    for members in groups.values():
        (heard if has_signal(members, algorithm) else silent).extend(members)
    return heard, silent


def has_signal(sequences: Sequence[TrainingSequence], algorithm: Algorithm) -> bool:
    """Whether the gradient can differ from 0: there is a pair, a nonzero advantage, or a term that needs neither.

    Also True if a logprob is not finite, so that the step is skipped as a bad step.
    """
    if algorithm.always_learns:
        return True
    if algorithm.compares_pairs:
        return any(one.preferred_to for one in sequences)
    for one in sequences:
        if one.nll_factor or (one.advantages is not None and np.any(one.advantages)):
            return True
        if np.any(one.selected.get(algorithm.learning_selection, False)):
            return True
        recorded = (one.behavior_logprobs, one.reference_logprobs, one.proximal_logprobs, one.teacher_logprobs)
        if not all(np.isfinite(logprobs).all() for logprobs in recorded if logprobs is not None):
            return True
    return False
