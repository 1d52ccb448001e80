"""One rank of the trainer: a batch of groups in, one optimizer step, a report out. No Ray here.

    advantages (per group) → token weights (whole batch, I9) → plan (ranks, rows) → forward, loss, backward per
    micro-batch → clip and update → metrics reduced over ranks

Every rank gets the same groups and takes its own share of the sequences. One step per batch (K = 1), so the proximal
policy is the target policy before its gradient: proximal = sg(target), no extra forward, ρ ≡ 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ports import StepReport
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.algorithms.aggregation import batch_normaliser
from penstock.trainer.algorithms.corrections import behavior_correction
from penstock.trainer.algorithms.kl import kl_term
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.policy_loss import policy_loss
from penstock.trainer.backend import Backend
from penstock.trainer.batches.collate import MicroBatch, TrainingSequence, collate, place_by_sequence
from penstock.trainer.batches.packing import BatchPlan, RowLayout, plan_batch
from penstock.trainer.batches.sequence_share import sequence_share
from penstock.trainer.batches.sequences import Example, batch_metrics, policy_sequences, supervised_sequences
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig
from penstock.weights.layout.engine import TrainingSide


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs besides the algorithm.

    Attributes:
        max_tokens_per_micro_batch: Padded tokens of one forward-backward of the ranks that share sequences.
        attention_share: a of the packing cost model, per token.
        attention: `sdpa` packs rows under a mask; `flash_attention_2` packs one row.
        temperature: Of sampling; the trainer's logprobs use the same.
        max_new_tokens: Sampling limit, the constant of `constant_length`.
    """

    max_tokens_per_micro_batch: int
    attention_share: float
    attention: str
    temperature: float
    max_new_tokens: int


class TeacherForced(NamedTuple):
    """How well a policy knows given answers.

    Attributes:
        greedy_accuracy: Share of examples whose every response token is the argmax: those that greedy decoding gives.
        sampled_accuracy: Mean probability of the whole response: the expected share that one sample at T = 1 gives.
    """

    greedy_accuracy: float
    sampled_accuracy: float


class _LossTerms(NamedTuple):
    """Per loss token of one micro-batch, `[K]`: what is summed with the token weights, and two flags for metrics."""

    terms: Tensor
    is_masked: Tensor
    is_clipped: Tensor


@dataclass(slots=True)
class _OpenStep:
    """What a step has gathered while its batch grows.

    Attributes:
        metrics: Sums over all micro-batches so far.
        normaliser: Σ over parts of what their gradients are still to be divided by; 0 if they are divided already.
        payloads: All groups so far, for the statistics of the batch.
        busy_s: Wall seconds spent on the parts before the last.
    """

    metrics: TokenMetrics
    normaliser: float = 0.0
    payloads: list[GroupPayload] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    packing_efficiencies: list[float] = field(default_factory=list)
    busy_s: float = 0.0


References = Sequence[NDArray[np.float32]]
_OF_POLICIES = ("ratio/", "mismatch/", "loss/reference_kl")
"""Metrics that compare policies; supervised steps have none."""
_LossFunction = Callable[[Tensor, MicroBatch], _LossTerms]


class PolicyTrainer:
    """Trains one policy through a `Backend`. Collective: all ranks make the same calls with the same arguments."""

    def __init__(
        self, backend: Backend, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, settings: StepSettings
    ) -> None:
        self.backend = backend
        self._algorithm = algorithm
        self._optimizer = optimizer
        self._settings = settings
        self._policy_loss = policy_loss(algorithm)
        self._correction = behavior_correction(algorithm)
        self._kl_term = kl_term(algorithm)
        self._num_steps = 0
        self._streamed: _OpenStep | None = None

    def step(
        self,
        payloads: Sequence[GroupPayload],
        version: int,
        min_versions: Sequence[int] | None = None,
        references: References = (),
    ) -> StepReport:
        """Train one batch once; after `accumulate`, its last part: same gradient and report as of the whole (I9).

        Of a batch in parts the normaliser is known only now, so the sum of gradients is divided before it is clipped.

        Args:
            payloads: The batch's groups with rewards.
            version: Policy version before the step.
            min_versions: Per group, tokens sampled before this version carry no loss weight; None: none is trimmed.
            references: Per group `[n] float32`, the reference policy's logprobs of its n sampled tokens; needed if
                `kl_coefficient` is above 0.

        Returns:
            version + 1 and metrics, or the same version if the step was skipped.
        """
        start = time.perf_counter()
        step, self._streamed = self._streamed, None
        normaliser = None if step is None else 1.0
        step = step or _OpenStep(TokenMetrics(self.backend.device))
        self._add(step, payloads, min_versions, references, normaliser, is_last=True)
        return self._close(step, version, start)

    def accumulate(
        self, payloads: Sequence[GroupPayload], min_versions: Sequence[int], references: References = ()
    ) -> None:
        """Add the gradient of a part of a batch, while the rest is still being generated; `step` ends the batch.

        Args:
            payloads: Groups with rewards.
            min_versions: As in `step`.
            references: As in `step`.
        """
        start = time.perf_counter()
        self._streamed = self._streamed or _OpenStep(TokenMetrics(self.backend.device))
        self._add(self._streamed, payloads, min_versions, references, 1.0, is_last=False)
        self._streamed.busy_s += time.perf_counter() - start

    def supervised_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One step of −logprob, the mean over all response tokens of the batch.

        Args:
            examples: (prompt ids, response ids) each; the end token, if wanted, is part of the response.
        """
        start = time.perf_counter()
        step = _OpenStep(TokenMetrics(self.backend.device))
        self._backward(step, supervised_sequences(examples), _sft_terms, is_last=True)
        metrics, _ = self._update(step)
        kept = {name: value for name, value in metrics.items() if not name.startswith(_OF_POLICIES)}
        kept["sft/loss"] = kept.pop("loss/policy")
        kept["trainer/step_s"] = time.perf_counter() - start
        return kept

    def teacher_forced(self, examples: Sequence[Example]) -> TeacherForced:
        """Measure examples without sampling: what greedy decoding and one sample would answer."""
        sequences = supervised_sequences(examples)
        num_wrong, gold_logprobs = np.zeros((2, len(sequences)))  # tokens of other ranks count 0
        with self.backend.evaluation():
            for micro_batch in self._micro_batches(sequences, self._plan(sequences)):
                logprobs, is_argmax = self.backend.forward(micro_batch.inputs, temperature=1.0)
                index = micro_batch.sequence_index
                np.add.at(num_wrong, index, ~is_argmax[: micro_batch.num_tokens].cpu().numpy())
                np.add.at(gold_logprobs, index, logprobs[: micro_batch.num_tokens].double().cpu().numpy())
        num_wrong, gold_logprobs = self.backend.all_reduce(np.stack([num_wrong, gold_logprobs]), "sum")
        return TeacherForced(float(np.mean(num_wrong == 0)), float(np.exp(gold_logprobs).mean()))

    def token_logprobs(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """`[n] float64`: of all n response tokens, one example after another, at the sampling temperature."""
        sequences = supervised_sequences(examples)
        starts = np.cumsum([0, *(len(sequence.targets) for sequence in sequences)])
        found = np.zeros(int(starts[-1]))  # tokens of other ranks count 0
        with self.backend.evaluation():
            for micro_batch in self._micro_batches(sequences, self._plan(sequences)):
                logprobs, _ = self.backend.forward(micro_batch.inputs, self._settings.temperature)
                values = logprobs[: micro_batch.num_tokens].double().cpu().numpy()
                place_by_sequence(values, micro_batch, starts, found)
        return self.backend.all_reduce(found, "sum")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and full tensor of every parameter. Collective: all ranks exhaust it, rank 0 yields."""
        return self.backend.export_weights()

    def training_side(self) -> TrainingSide:
        """Which tensors there are and how the ranks hold them."""
        return self.backend.training_side()

    def local_weights(self) -> dict[str, Tensor]:
        """HF name -> what this rank holds of the tensor, flat; aliases of live weights."""
        return self.backend.local_weights()

    def close(self) -> None:
        """Leave the process group."""
        self.backend.close()

    def _add(
        self,
        step: _OpenStep,
        payloads: Sequence[GroupPayload],
        min_versions: Sequence[int] | None,
        references: References,
        normaliser: float | None,
        *,
        is_last: bool,
    ) -> None:
        """Add the gradient of some groups to a step; `normaliser` 1.0: it is divided by the batch's at the end."""
        algorithm, limit = self._algorithm, self._settings.max_new_tokens
        if algorithm.kl_coefficient and not references:
            raise TrainingError(
                f"trainer: algorithm.kl_coefficient={algorithm.kl_coefficient:g}, but the groups came without "
                "reference logprobs. Start a reference worker, or set it to 0."
            )
        sequences = policy_sequences(payloads, algorithm, limit, min_versions, normaliser, references)
        if normaliser is not None:
            counts = np.array([len(sequence.targets) for sequence in sequences])
            step.normaliser += batch_normaliser(counts, algorithm.aggregation)
        step.payloads.extend(payloads)
        self._backward(step, sequences, self._rl_terms, is_last=is_last)

    def _backward(
        self, step: _OpenStep, sequences: Sequence[TrainingSequence], loss_function: _LossFunction, *, is_last: bool
    ) -> None:
        """Forward and backward over these sequences, micro-batch by micro-batch."""
        plan = self._plan(sequences)
        count = len(plan.ranks[self.backend.data_parallel_rank])
        for position, micro_batch in enumerate(self._micro_batches(sequences, plan)):
            target, entropies = self.backend.forward(micro_batch.inputs, self._settings.temperature)
            terms, is_masked, is_clipped = loss_function(target, micro_batch)
            loss = (terms * micro_batch.token_weights).sum()
            self.backend.backward(loss, is_last=is_last and position == count - 1)
            if micro_batch.num_tokens:
                step.metrics.add(
                    loss,
                    target,
                    micro_batch.behavior_logprobs,
                    micro_batch.reference_logprobs,
                    entropies,
                    is_masked,
                    is_clipped,
                )
        step.micro_batches.append(count)
        step.packing_efficiencies.append(plan.efficiency)

    def _update(self, step: _OpenStep) -> tuple[dict[str, float], bool]:
        """The optimizer step. Returns metrics and whether it was skipped."""
        normaliser = max(step.normaliser, 1.0)
        lr = self._warmed_up_lr()
        self.backend.set_lr(lr)
        result = self.backend.optimizer_step(normaliser)
        self._num_steps += not result.is_skipped
        metrics = step.metrics.reduce(self.backend.all_reduce)
        metrics["loss/policy"] /= normaliser
        if not self._algorithm.kl_coefficient:
            del metrics["loss/reference_kl"]
        metrics |= {
            "loss/grad_norm": result.grad_norm,
            "loss/lr": lr,
            "trainer/num_micro_batches": float(sum(step.micro_batches)),
            "trainer/batch_parts": float(len(step.micro_batches)),
            "trainer/packing_efficiency": float(np.average(step.packing_efficiencies, weights=step.micro_batches)),
        }
        return metrics, result.is_skipped

    def _close(self, step: _OpenStep, version: int, start: float) -> StepReport:
        """Update the policy and say what the step did; `start` is when its last part began."""
        metrics, is_skipped = self._update(step)
        metrics |= batch_metrics(step.payloads)
        metrics["trainer/step_s"] = busy_s = step.busy_s + time.perf_counter() - start
        return StepReport(version if is_skipped else version + 1, is_skipped, metrics, busy_s)

    def _plan(self, sequences: Sequence[TrainingSequence]) -> BatchPlan:
        masked_layout: RowLayout = "rows" if self.backend.sequence_parallel_size == 1 else "single_sequence"
        return plan_batch(
            [sequence.num_inputs for sequence in sequences],
            self.backend.data_parallel_size,
            self._settings.max_tokens_per_micro_batch,
            attention_share=self._settings.attention_share,
            layout=masked_layout if self._settings.attention == "sdpa" else "single_row",
        )

    def _micro_batches(self, sequences: Sequence[TrainingSequence], plan: BatchPlan) -> Iterator[MicroBatch]:
        backend, needs_mask = self.backend, self._settings.attention == "sdpa"
        for planned in plan.ranks[backend.data_parallel_rank]:
            micro_batch = collate(planned, sequences, device=backend.device, needs_mask=needs_mask)
            if backend.sequence_parallel_size == 1:
                yield micro_batch
            else:
                yield sequence_share(micro_batch, backend.sequence_parallel_rank, backend.sequence_parallel_size)

    def _rl_terms(self, target: Tensor, micro_batch: MicroBatch) -> _LossTerms:
        """Policy loss and divergence from the reference, times behavior correction, with proximal = sg(target)."""
        proximal = target.detach()
        behavior = micro_batch.behavior_logprobs
        terms, is_clipped = self._policy_loss(target, proximal, behavior, micro_batch.advantages)
        factors, is_masked = self._correction(proximal, behavior)
        divergence = self._kl_term(target, micro_batch.reference_logprobs)  # of stale tokens: weighted like the rest
        return _LossTerms((terms + divergence) * factors, is_masked, is_clipped)

    def _warmed_up_lr(self) -> float:
        """Linear from lr / warmup_steps at the first step to lr, then constant."""
        warmup = self._optimizer.warmup_steps
        return self._optimizer.lr * (min(1.0, (self._num_steps + 1) / warmup) if warmup else 1.0)


def _sft_terms(target: Tensor, micro_batch: MicroBatch) -> _LossTerms:
    none = torch.zeros_like(micro_batch.advantages, dtype=torch.bool)
    return _LossTerms(-target, none, none)
