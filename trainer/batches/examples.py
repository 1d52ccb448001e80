"""Sequences of given answers: examples (supervised) and pairs (preferences).

Shape legend: P pairs, n tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.batches.mini_batches import weigh
from penstock.trainer.batches.packing import PLACEHOLDER_ID, TrainingSequence

Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, response token ids)."""
ModelKind = Literal["policy", "reward"]


class Preference(NamedTuple):
    """Two answers to one prompt, as token ids, with their end tokens."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def supervised_sequences(examples: Sequence[Example]) -> list[TrainingSequence]:
    """One sequence per example; every response token has the weight 1 / (response tokens of the batch)."""
    total = max(sum(len(response) for _, response in examples), 1)
    return [
        TrainingSequence(
            token_ids=np.array([*prompt, *response], dtype=np.int64),
            targets=np.arange(len(prompt), len(prompt) + len(response)),
            behavior_logprobs=np.zeros(len(response), dtype=np.float32),
            token_weight=1.0 / total,
        )
        for prompt, response in examples
    ]


def preference_sequences(
    pairs: Sequence[Preference],
    kind: ModelKind,
    algorithm: Algorithm,
    reference_logprobs: Sequence[NDArray[np.float32]] | None = None,
) -> list[TrainingSequence]:
    """The chosen and the rejected answer of every pair, both in one micro-batch.

    Args:
        pairs: The pairs of the batch.
        kind: Whether the model is a policy or a reward model.
        algorithm: An algorithm with a loss of pairs.
        reference_logprobs: `[n]` per answer, chosen and rejected alternating: the reference's logprob of each of its n
            tokens, which is compared with the policy's token by token. None: 0.
    """
    sequences: list[TrainingSequence] = []
    for index, pair in enumerate(pairs):
        for answer in (pair.chosen, pair.rejected):
            token_ids = [*pair.prompt, *answer, PLACEHOLDER_ID]
            targets = np.arange(len(pair.prompt), len(token_ids) - 1) if kind == "policy" else [len(token_ids) - 1]
            sequences.append(
                TrainingSequence(
                    token_ids=np.array(token_ids, np.int64),
                    targets=np.asarray(targets, np.int64),
                    behavior_logprobs=np.zeros(len(targets), np.float32),
                    reference_logprobs=None if reference_logprobs is None else reference_logprobs[len(sequences)],
                    preferred_to=(2 * index + 1,) if answer is pair.chosen else (),
                    unit=index,
                    group=index,
                )
            )
    return weigh(sequences, algorithm, max_new_tokens=1, normaliser=None)


def margins_of(per_target: Sequence[NDArray[np.float64]], *, per_token: bool) -> NDArray[np.float64]:
    """`[P]`: sum or mean of the chosen minus that of the rejected answer; `per_target` alternates between the two."""
    of_answers = np.array([values.mean() if per_token else values.sum() for values in per_target])
    return of_answers[0::2] - of_answers[1::2]
