"""From the groups of a batch to its sequences, with what must be known before the gradient.

    groups → V of the critic, logprobs of the policy without its adapters → advantages → proximal logprobs → sequences

The forward passes without gradient that this takes use the weights at the start of the step. They run for single groups
before their batch is complete (`ahead`), while the ranks would be idle, and for the rest of the batch when the step
begins (`build`). See docs/concepts/dataflow.md, "Early logprobs".

Shape legend: n sampled tokens of a group, members one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.algorithms.advantages import GaeConfig
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.batches.samples import policy_sequences
from penstock.trainer.flops import FlopCounter
from penstock.trainer.micro_batches import MicroBatchPasses
from penstock.trainer.models.critic import Critic


class Forwarded(NamedTuple):
    """A group with the results of its forward passes."""

    version: int
    """Policy version with which they were computed."""
    seconds: float
    """Time that they took on this rank."""
    payload: GroupPayload


@dataclass(slots=True)
class EarlyResults:
    """Early results of one rank. They are equal on all ranks, which get the same calls in the same order.

    Invariant: all results were computed with the weights at the start of the next step. They are therefore discarded
    after every step and every other weight update. Comparing versions is not enough, because a skipped step keeps the
    version but may have updated the critic.
    """

    _kept: dict[GroupId, Forwarded] = field(default_factory=dict)
    _taken: set[GroupId] = field(default_factory=set)
    _num_tokens: int = 0
    _num_taken_tokens: int = 0
    _seconds: float = 0.0

    def keep(self, forwarded: Forwarded) -> None:
        """Keep the results of a group."""
        self._kept[forwarded.payload.group_id] = forwarded
        self._seconds += forwarded.seconds

    def of(self, payloads: Sequence[GroupPayload], version: int) -> list[GroupPayload]:
        """Return the groups of a batch (or a part of it) that trains from `version`, with their early results."""
        found = []
        for payload in payloads:
            num_tokens = sum(trajectory.num_sampled_tokens for trajectory in payload.trajectories)
            self._num_tokens += num_tokens
            kept = self._kept.get(payload.group_id)
            if kept is None or kept.version != version:
                found.append(payload)
                continue
            self._taken.add(payload.group_id)
            self._num_taken_tokens += num_tokens
            reference = kept.payload.reference if payload.reference is None else payload.reference
            values, cut_values, proximal = kept.payload.values, kept.payload.cut_values, kept.payload.proximal
            found.append(replace(payload, values=values, cut_values=cut_values, proximal=proximal, reference=reference))
        return found

    def forget(self) -> tuple[dict[str, float], float]:
        """Discard all results, because the weights have changed or may have changed.

        Returns:
            Metrics of the batch since the last call, and the seconds of all forwards since then.
        """
        used_s = sum(self._kept[group_id].seconds for group_id in self._taken)
        seconds = self._seconds
        metrics = {
            "trainer/early_logprobs_token_share": self._num_taken_tokens / max(self._num_tokens, 1),
            "trainer/early_logprobs_used_s": used_s,
            "trainer/early_logprobs_unused_s": max(seconds - used_s, 0.0),
        }
        self._kept, self._taken = {}, set()
        self._num_tokens, self._num_taken_tokens, self._seconds = 0, 0, 0.0
        return metrics, seconds


class BatchBuilder:
    """Builds the batches of one rank. Collective: all ranks make the same calls with the same arguments."""

    def __init__(
        self, passes: MicroBatchPasses, critic: Critic | None, flops: FlopCounter, algorithm: Algorithm
    ) -> None:
        self._passes = passes
        self._critic = critic
        self._flops = flops
        self._early_results = EarlyResults()
        self.use(algorithm)

    def use(self, algorithm: Algorithm) -> None:
        """Build the next batches with these coefficients."""
        self._algorithm = algorithm
        self._recomputes = algorithm.config.proximal == "recompute"
        # The reference is the policy without its adapters.
        self._is_own_reference = algorithm.needs_reference and bool(self._passes.backend.adapters)
        self._has_forwards = self._critic is not None or self._recomputes or self._is_own_reference

    def ahead(self, payloads: Sequence[GroupPayload], version: int) -> None:
        """Compute and keep what the step at `version` needs of these groups."""
        for payload in payloads if self._has_forwards else ():
            start = time.perf_counter()
            (forwarded,) = self._completed([payload])
            if self._recomputes:
                (proximal,) = self._passes.per_sampled_token([payload], self._flops)
                forwarded = replace(forwarded, proximal=proximal)
            self._early_results.keep(Forwarded(version, time.perf_counter() - start, forwarded))

    def build(
        self, payloads: Sequence[GroupPayload], version: int, normaliser: float | None = None
    ) -> list[TrainingSequence]:
        """Build sequences with advantages, and proximal logprobs if they are recomputed, reusing early results.

        Args:
            payloads: The groups of the batch, or of a part of it.
            version: Policy version before the step.
            normaliser: As in `policy_sequences`; 1.0 if it is not known yet.

        Raises:
            TrainingError: If groups came without logprobs of a reference or teacher that the algorithm needs.
        """
        algorithm, spec = self._algorithm, self._passes.spec
        lacks_reference = any(payload.reference is None for payload in payloads)
        if algorithm.needs_reference and lacks_reference and not self._is_own_reference:
            config = algorithm.config
            setting = f"loss={config.loss.name}, kl.coefficient={config.kl.coefficient:g}"
            raise TrainingError(
                f"trainer: algorithm.{setting}, but the groups came without reference logprobs. Start a reference "
                "worker, or use an algorithm without a reference."
            )
        if algorithm.needs_teacher and any(payload.teacher is None for payload in payloads):
            raise TrainingError(
                f"trainer: algorithm.loss={algorithm.config.loss.name}, but the groups came without logprobs of a "
                "teacher. Start a teacher (teacher.path), or use a loss that learns from rewards."
            )
        groups = self._completed(self._early_results.of(payloads, version))
        sequences = policy_sequences(
            groups,
            algorithm,
            spec.max_new_tokens,
            version,
            normaliser,
            spec.policy_id,
            spec.record_every,
            spec.pass_reward,
        )
        if not self._recomputes:
            return sequences
        missing = [index for index, one in enumerate(sequences) if one.proximal_logprobs is None]
        # Only loss tokens are computed. Pairs refer to the whole batch, and a forward pass does not need them.
        if rest := [replace(sequences[index], preferred_to=(), unit=None) for index in missing]:
            for index, logprobs in zip(missing, self._passes.per_target(rest, self._flops), strict=True):
                sequences[index] = replace(sequences[index], proximal_logprobs=logprobs.astype(np.float32))
        return algorithm.select(sequences, seed=version)

    def forget(self) -> tuple[dict[str, float], float]:
        """Call `EarlyResults.forget` after weights have changed. Without early results there are no metrics."""
        metrics, seconds = self._early_results.forget()
        return (metrics if self._has_forwards else {}), seconds

    def _completed(self, payloads: Sequence[GroupPayload]) -> list[GroupPayload]:
        """Add missing values of the critic and missing logprobs of the policy without its adapters."""
        groups = list(payloads)
        if self._is_own_reference:
            with self._passes.backend.adapters.off():
                groups = _filled(groups, "reference", partial(self._passes.per_sampled_token, flops=self._flops))
        if self._critic is not None:
            groups = _filled(groups, "values", self._critic.values)
            settings = self._algorithm.advantage_settings
            if isinstance(settings, GaeConfig) and settings.bootstrap:
                groups = _filled(groups, "cut_values", self._critic.cut_values)
        return groups


def _filled(
    payloads: Sequence[GroupPayload],
    name: Literal["reference", "values", "cut_values"],
    compute: Callable[[Sequence[GroupPayload]], list[NDArray[np.float32]]],
) -> list[GroupPayload]:
    """Return the known results, with the gaps filled by `compute` in one pass over the groups without results."""
    missing = [payload for payload in payloads if getattr(payload, name) is None]
    computed: Iterator[Any] = iter(compute(missing) if missing else ())
    return [replace(one, **{name: next(computed)}) if getattr(one, name) is None else one for one in payloads]
