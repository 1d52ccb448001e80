"""From preference pairs to the sequences of one optimizer step, of a policy (DPO) or of a reward model (Bradley-Terry).

Both are the pair loss of trainer/algorithms/pair_losses.py. A policy's answer counts by the sum of its logprobs, a
reward model's by its score: the value at the last token.

Shape legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.batches.collate import TrainingSequence
from penstock.trainer.batches.sequences import weigh
from penstock.trainer.config import AlgorithmConfig

ModelKind = Literal["policy", "reward"]
_NOTHING = 0
"""Stands where a token would follow the last one; it is never seen by the model."""


class Preference(NamedTuple):
    """Two answers to one prompt, as token ids; their end tokens are part of them."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


def preference_sequences(
    pairs: Sequence[Preference],
    kind: ModelKind,
    algorithm: AlgorithmConfig,
    reference_logprobs: Sequence[NDArray[np.float32]] | None = None,
) -> list[TrainingSequence]:
    """Chosen and rejected of every pair, side by side in one micro-batch.

    Args:
        pairs: Of the batch.
        kind: What the model is.
        algorithm: With a loss of pairs.
        reference_logprobs: `[n]` per answer, chosen and rejected in turns: the reference's logprob of each of its n
            tokens, which is compared with the policy's token by token. None: 0.
    """
    sequences: list[TrainingSequence] = []
    for index, pair in enumerate(pairs):
        for answer in (pair.chosen, pair.rejected):
            token_ids = [*pair.prompt, *answer, _NOTHING]
            targets = np.arange(len(pair.prompt), len(token_ids) - 1) if kind == "policy" else [len(token_ids) - 1]
            sequences.append(
                TrainingSequence(
                    token_ids=np.array(token_ids, np.int64),
                    targets=np.asarray(targets, np.int64),
                    behavior_logprobs=np.zeros(len(targets), np.float32),
                    reference_logprobs=None if reference_logprobs is None else reference_logprobs[len(sequences)],
                    preferred_to=(2 * index + 1,) if answer is pair.chosen else (),
                    unit=index,
                    prompt_length=len(pair.prompt),
                    group=index,
                )
            )
    return weigh(sequences, algorithm, max_new_tokens=1, normaliser=None)


def margins_of(per_target: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """`[P]`: of what the model says of chosen and rejected in turns, how much more the chosen answer is worth to it."""
    worth = np.array([values.sum() for values in per_target])
    return worth[0::2] - worth[1::2]
