"""The configured algorithm with its functions looked up, once: what builds batches and computes the loss works with it.

A loss or correction of a whole batch selects tokens by comparing all its loss tokens, before the first gradient. Every
rank has the whole batch there, so the selection is the same however the batch is split into ranks, mini-batches,
micro-batches and rows (I9). The logprobs of the policy are those at the start of the batch, p of `proximal=recompute`.
Tokens are selected by their numbers, so the order of the batch does not matter; of tokens that are equal in all of
them, `kl_cov` selects the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from penstock.trainer.algorithms.advantages import with_teacher
from penstock.trainer.algorithms.catalog import Custom, Entry, find
from penstock.trainer.algorithms.tokens import BatchTokens
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.config import AlgorithmConfig


class Algorithm:
    """An algorithm as plain values and functions, so that a step asks no configuration.

    Attributes:
        selecting: Function's name, selection and settings of each loss and correction that selects tokens of the batch.
        always_learns: Whether sequences without an advantage have a gradient, too.
        learning_selection: Name of a selection whose tokens have a gradient without an advantage, too; else empty.
        weighs_divergence: Whether the divergence has a weight of its own, because the policy loss takes none.
        metrics: Names of what the loss measures of each token.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Look up the functions that the configuration names.

        Raises:
            ConfigError: If an import path does not resolve.
        """
        loss, advantage = config.loss_entry, find("advantage", config.advantage.name)
        self.config = config
        self.loss, self.loss_settings = loss.load(), _settings(config.loss, loss)
        self.advantage, self.advantage_settings = advantage.load(), _settings(config.advantage, advantage)
        self.compares_groups = advantage.level == "group"
        chain = config.correction.chain
        self.chain = [partial(entry.function, config=chain[entry.name]) for entry in config.correction.entries]
        self.proximal = find("proximal", config.proximal).function
        self.kl = find("kl", config.kl.estimator).function
        self.compares_pairs = config.compares_pairs
        # The term of a pair is repeated at every token of its members; the weights average it.
        mean = "seq_mean_token_mean" if self.compares_pairs else config.aggregation
        self.aggregation = find("aggregation", mean).function
        self.selecting = [
            (entry.function.__name__, entry.select, self.loss_settings if entry.kind == "loss" else chain[entry.name])
            for entry in config.entries_of_batch
            if entry.select is not None
        ]
        self.kl_in_loss, self.kl_in_reward = config.kl_in_loss, config.kl_in_reward
        learns = self.kl_in_loss or config.entropy.coefficient or config.teacher_coefficient
        self.always_learns = bool(learns) or loss.is_own or not loss.needs_advantages
        self.learning_selection = loss.function.__name__ if loss.selected_learn else ""
        self.weighs_divergence = config.weighs_divergence
        self.needs_reference, self.needs_teacher = config.needs_reference, config.needs_teacher
        self.metrics = tuple(loss.metrics)

    def select(self, sequences: Sequence[TrainingSequence], seed: int) -> list[TrainingSequence]:
        """Mark the tokens of the batch that the loss and the corrections select.

        Args:
            sequences: All of the batch, with proximal logprobs.
            seed: Of what is drawn; the policy version.
        """
        marked = list(sequences)
        proximal = _column(sequences, "proximal_logprobs")
        if not self.selecting or not len(proximal):
            return marked
        advantages = _column(sequences, "advantages")
        if coefficient := self.config.teacher_coefficient:
            advantages = with_teacher(advantages, _column(sequences, "teacher_logprobs"), proximal, coefficient)
        tokens = BatchTokens(proximal, _column(sequences, "behavior_logprobs"), advantages, seed)
        ends = np.cumsum([len(one.targets) for one in sequences])[:-1]
        for name, select, settings in self.selecting:
            chosen = np.split(select(tokens, settings), ends)
            marked = [replace(one, selected={**one.selected, name: of}) for one, of in zip(marked, chosen, strict=True)]
        return marked


def _settings(section: BaseModel, entry: Entry) -> BaseModel:
    """The section, or the settings that a user's own function has declared."""
    if isinstance(section, Custom) and entry.settings is not None:
        return entry.settings.model_validate(section.args)
    return section


def _column(sequences: Sequence[TrainingSequence], name: str) -> NDArray[np.float64]:
    """`[T]` of all loss tokens; 0 where a sequence has none."""
    columns = [(getattr(one, name), len(one.targets)) for one in sequences]
    found = [np.zeros(count) if one is None else one.astype(np.float64) for one, count in columns]
    return np.concatenate([np.zeros(0), *found])
