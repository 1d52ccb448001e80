"""Forward passes over the sequences of a batch: planning, collation, and execution by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.backends.base import Backend
from penstock.trainer.batches.collate import MicroBatch, collate, sequence_share
from penstock.trainer.batches.packing import (
    BatchPlan,
    TrainingSequence,
    plan_rows,
    row_layout,
)
from penstock.trainer.batches.samples import all_sequences, sampled_tokens
from penstock.trainer.flops import FlopCounter, attention_share
from penstock.trainer.spec import TrainerSpec


class TeacherForced(NamedTuple):
    """Accuracy of a policy on given answers, measured by teacher forcing."""

    greedy_accuracy: float
    """Share of examples whose every response token is the argmax: those that greedy decoding gives."""
    sampled_accuracy: float
    """Mean probability of the whole response: the expected share that one sample at T = 1 gives."""


@dataclass(frozen=True, slots=True)
class MicroBatchPasses:
    """The passes of this rank, by a plan that is the same on all ranks."""

    backend: Backend
    spec: TrainerSpec

    def plan(self, sequences: Sequence[TrainingSequence]) -> BatchPlan:
        """Plan which rank and micro-batch computes each sequence."""
        trainer, num_ranks = self.spec.trainer, self.backend.data_parallel_size
        max_tokens = trainer.max_tokens_per_micro_batch * trainer.sequence_parallel_size
        share = attention_share(self.spec.model.shape)
        layout = row_layout(self.spec.model)
        return plan_rows(sequences, num_ranks, max_tokens, share, layout, share_prompts=trainer.share_prompts)

    def micro_batches(self, sequences: Sequence[TrainingSequence], plan: BatchPlan) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank as tensors."""
        backend, needs_mask = self.backend, row_layout(self.spec.model) != "single_row"
        for planned in plan.ranks[backend.data_parallel_rank]:
            micro_batch = collate(planned, sequences, device=backend.device, needs_mask=needs_mask)
            if backend.sequence_parallel_size == 1:
                yield micro_batch
            else:
                rank, size = backend.sequence_parallel_rank, backend.sequence_parallel_size
                yield sequence_share(micro_batch, rank, size, backend.context_group)

    def per_sampled_token(
        self, payloads: Sequence[GroupPayload], flops: FlopCounter | None = None
    ) -> list[NDArray[np.float32]]:
        """`per_target` of whole groups: `[n] float32` each, of its n sampled tokens, members one after another."""
        found = self.per_target(sampled_tokens(payloads, self.spec.policy_id), flops)
        ends = np.cumsum([len(all_sequences([payload])) for payload in payloads])[:-1].tolist()
        borders = zip([0, *ends], [*ends, len(found)], strict=True)
        return [np.concatenate(found[start:stop]).astype(np.float32) for start, stop in borders]

    def per_target(
        self, sequences: Sequence[TrainingSequence], flops: FlopCounter | None = None
    ) -> list[NDArray[np.float64]]:
        """Output of the model for every target token, without gradient: `[n_i]` each, the same on all ranks.

        Args:
            sequences: Of which the target tokens are computed.
            flops: Where the computation is counted; None: nowhere, as it is no part of a step.
        """
        plan = self.plan(sequences)
        if flops is not None:
            flops.computed(sequences, plan.shared_lengths, num_forwards=1)
        counts = [len(sequence.targets) for sequence in sequences]
        starts = np.cumsum([0, *counts])
        found = np.zeros(int(starts[-1]))  # tokens of other ranks count 0
        with self.backend.evaluation():
            for micro_batch in self.micro_batches(sequences, plan):
                values, _ = self.backend.forward(micro_batch.inputs, self.spec.temperature)
                places = starts[micro_batch.sequence_index] + micro_batch.token_index
                found[places] = values[: micro_batch.num_tokens].double().cpu().numpy()
        return np.split(self.backend.all_reduce(found, "sum"), starts[1:-1]) if counts else []

    def teacher_forced(self, sequences: Sequence[TrainingSequence]) -> TeacherForced:
        """Measure answers without sampling them, the same on all ranks."""
        num_wrong, gold_logprobs = np.zeros((2, len(sequences)))  # tokens of other ranks count 0
        with self.backend.evaluation():
            for micro_batch in self.micro_batches(sequences, self.plan(sequences)):
                logprobs, is_argmax = self.backend.forward(micro_batch.inputs, temperature=1.0)
                index = micro_batch.sequence_index
                np.add.at(num_wrong, index, ~is_argmax[: micro_batch.num_tokens].cpu().numpy())
                np.add.at(gold_logprobs, index, logprobs[: micro_batch.num_tokens].double().cpu().numpy())
        num_wrong, gold_logprobs = self.backend.all_reduce(np.stack([num_wrong, gold_logprobs]), "sum")
        return TeacherForced(float(np.mean(num_wrong == 0)), float(np.exp(gold_logprobs).mean()))
