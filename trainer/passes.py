"""Forward and backward passes over the sequences of a batch: planned, laid out, and run micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import POLICY, PolicyId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.backend import Backend
from penstock.trainer.batches.collate import MicroBatch, TrainingSequence, collate, place_by_sequence
from penstock.trainer.batches.packing import BatchPlan, RowLayout
from penstock.trainer.batches.preferences import ModelKind
from penstock.trainer.batches.sequence_share import sequence_share
from penstock.trainer.batches.sequences import loss_tokens
from penstock.trainer.batches.units import plan_units


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs besides the algorithm.

    Attributes:
        max_tokens_per_micro_batch: Padded tokens of one forward-backward of the ranks that share sequences.
        attention_share: a of the packing cost model, per token.
        attention: `sdpa` packs rows under a mask; `flash_attention_2` packs one row.
        temperature: Of sampling; the trainer's logprobs use the same.
        max_new_tokens: Sampling limit, the constant of `constant_length`.
        kind: A policy, or a reward model, which is trained with preferences only.
        policy_id: Which of the policies of a run is trained.
    """

    max_tokens_per_micro_batch: int
    attention_share: float
    attention: str
    temperature: float
    max_new_tokens: int
    kind: ModelKind = "policy"
    policy_id: PolicyId = POLICY


@dataclass(frozen=True, slots=True)
class Passes:
    """This rank's share of a batch, by a plan that is the same on all ranks."""

    backend: Backend
    settings: StepSettings

    def plan(self, sequences: Sequence[TrainingSequence]) -> BatchPlan:
        """Which sequences go where."""
        masked_layout: RowLayout = "rows" if self.backend.sequence_parallel_size == 1 else "single_sequence"
        return plan_units(
            [sequence.num_inputs for sequence in sequences],
            [sequence.unit for sequence in sequences],
            self.backend.data_parallel_size,
            self.settings.max_tokens_per_micro_batch,
            attention_share=self.settings.attention_share,
            layout=masked_layout if self.settings.attention == "sdpa" else "single_row",
        )

    def micro_batches(self, sequences: Sequence[TrainingSequence], plan: BatchPlan) -> Iterator[MicroBatch]:
        """Those of this rank, as tensors."""
        backend, needs_mask = self.backend, self.settings.attention == "sdpa"
        for planned in plan.ranks[backend.data_parallel_rank]:
            micro_batch = collate(planned, sequences, device=backend.device, needs_mask=needs_mask)
            if backend.sequence_parallel_size == 1:
                yield micro_batch
            else:
                yield sequence_share(micro_batch, backend.sequence_parallel_rank, backend.sequence_parallel_size)

    def per_sampled_token(self, payloads: Sequence[GroupPayload]) -> list[NDArray[np.float32]]:
        """`per_target` of whole groups: `[n] float32` each, of its n sampled tokens, members one after another."""
        members = [one for payload in payloads for one in payload.trajectories]
        found = self.per_target(
            [
                TrainingSequence(one.token_ids, targets := loss_tokens(one), np.zeros(len(targets), np.float32))
                for one in members
            ]
        )
        ends = np.cumsum([len(payload.trajectories) for payload in payloads])[:-1].tolist()
        borders = zip([0, *ends], [*ends, len(found)], strict=True)
        return [np.concatenate(found[start:stop]).astype(np.float32) for start, stop in borders]

    def per_target(self, sequences: Sequence[TrainingSequence]) -> list[NDArray[np.float64]]:
        """What the model says of every target token, without gradient: `[n_i]` each, the same on all ranks."""
        counts = [len(sequence.targets) for sequence in sequences]
        starts = np.cumsum([0, *counts])
        found = np.zeros(int(starts[-1]))  # tokens of other ranks count 0
        with self.backend.evaluation():
            for micro_batch in self.micro_batches(sequences, self.plan(sequences)):
                values, _ = self.backend.forward(micro_batch.inputs, self.settings.temperature)
                mine = values[: micro_batch.num_tokens].double().cpu().numpy()
                place_by_sequence(mine, micro_batch, starts, found)
        return np.split(self.backend.all_reduce(found, "sum"), starts[1:-1]) if counts else []
