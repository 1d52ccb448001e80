"""What a step needs of the policy and its critic without gradient, at the weights it begins with.

    V of the critic, logprobs of the policy without its adapters, proximal logprobs

Each is computed of single groups before their batch is complete (`ahead`), while the ranks would stand idle, and of the
rest of the batch when the step begins (`sequences`). See docs/concepts/dataflow.md, "Prefetch".

Shape legend: n sampled tokens of a group, members one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.batches.sequences import policy_sequences, sampled_tokens
from penstock.trainer.critic import Critic
from penstock.trainer.passes import Passes
from penstock.trainer.work import Work

PerToken = NDArray[np.float32]
References = Sequence[PerToken]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Of one group, each `[n] float32`; None where the algorithm needs none.

    Attributes:
        version: Of the policy that it was computed with.
        seconds: That it took this rank.
        values: V of the critic before each token.
        proximal: Logprobs of the policy.
        reference: Logprobs of the policy without its adapters.
    """

    version: int
    seconds: float
    values: PerToken | None = None
    proximal: PerToken | None = None
    reference: PerToken | None = None


@dataclass(slots=True)
class Prefetched:
    """What one rank has forwarded ahead; equal on all ranks, since all get the same calls in the same order.

    Invariant: all that is kept was computed with the weights that the next step begins with. So a step ends with
    nothing kept, and so does every other update of weights. The version alone would not do: a step that is skipped
    keeps the version, and a critic may have moved in it.
    """

    _kept: dict[GroupId, Forwarded] = field(default_factory=dict)
    _taken: set[GroupId] = field(default_factory=set)
    _num_tokens: int = 0
    _num_taken_tokens: int = 0
    _seconds: float = 0.0

    def keep(self, group_id: GroupId, forwarded: Forwarded) -> None:
        """A group was forwarded."""
        self._kept[group_id] = forwarded
        self._seconds += forwarded.seconds

    def of(self, payloads: Sequence[GroupPayload], version: int) -> list[Forwarded | None]:
        """What there is of each group of a batch, or of a part of it, that trains from `version`."""
        found = [self._kept.get(payload.group_id) for payload in payloads]
        valid = [one if one is not None and one.version == version else None for one in found]
        for payload, one in zip(payloads, valid, strict=True):
            num_tokens = sum(trajectory.num_sampled_tokens for trajectory in payload.trajectories)
            self._num_tokens += num_tokens
            if one is not None:
                self._taken.add(payload.group_id)
                self._num_taken_tokens += num_tokens
        return valid

    def forget(self) -> tuple[dict[str, float], float]:
        """Weights moved, or may have: nothing is kept any more.

        Returns:
            Metrics of the batch since the last call, and the seconds of all forwards since then.
        """
        used_s = sum(self._kept[group_id].seconds for group_id in self._taken)
        seconds = self._seconds
        metrics = {
            "trainer/prefetched_token_share": self._num_taken_tokens / max(self._num_tokens, 1),
            "trainer/prefetch_used_s": used_s,
            "trainer/prefetch_unused_s": max(seconds - used_s, 0.0),
        }
        self._kept, self._taken = {}, set()
        self._num_tokens, self._num_taken_tokens, self._seconds = 0, 0, 0.0
        return metrics, seconds


class Forwards:
    """One rank's. Collective: all ranks make the same calls with the same arguments."""

    def __init__(self, passes: Passes, critic: Critic | None, work: Work) -> None:
        self._passes = passes
        self._algorithm = passes.spec.algorithm
        self._critic = critic
        self._work = work
        self._prefetched = Prefetched()

    @property
    def are_needed(self) -> bool:
        """There is anything to compute before the loss."""
        return self._critic is not None or self._recomputes or self._is_own_reference

    def ahead(self, payloads: Sequence[GroupPayload], version: int, references: References = ()) -> None:
        """Compute and keep all that the step at `version` needs of these groups; `references`: they have theirs."""
        for payload in payloads if self.are_needed else ():
            start, group = time.perf_counter(), [payload]
            values = None if self._critic is None else self._critic.values(group)[0]
            proximal = self._logprobs(group)[0] if self._recomputes else None
            reference = self._reference_logprobs(group)[0] if self._is_own_reference and not references else None
            seconds = time.perf_counter() - start
            self._prefetched.keep(payload.group_id, Forwarded(version, seconds, values, proximal, reference))

    def sequences(
        self,
        payloads: Sequence[GroupPayload],
        version: int,
        min_versions: Sequence[int] | None = None,
        references: References = (),
        normaliser: float | None = None,
        teachers: References = (),
    ) -> list[TrainingSequence]:
        """With advantages, and proximal logprobs if they are recomputed; what is there already is not computed again.

        Args:
            payloads: The groups of the batch, or of a part of it.
            version: Policy version before the step.
            min_versions: As in `policy_sequences`.
            references: As in `policy_sequences`.
            normaliser: As in `policy_sequences`; 1.0: it is not known yet.
            teachers: As in `policy_sequences`.

        Raises:
            TrainingError: If groups came without logprobs of a reference or teacher that the algorithm needs.
        """
        algorithm = self._algorithm
        if algorithm.needs_reference and not references and not self._is_own_reference:
            asked = f"loss={algorithm.loss}, kl_coefficient={algorithm.kl_coefficient:g}"
            raise TrainingError(
                f"trainer: algorithm.{asked}, but the groups came without reference logprobs. Start a reference "
                "worker, or use an algorithm that compares with none."
            )
        if algorithm.needs_teacher and not teachers:
            raise TrainingError(
                f"trainer: algorithm.loss={algorithm.loss}, but the groups came without logprobs of a teacher. Start "
                "one (teacher.path), or use a loss that learns from rewards."
            )
        spec, found = self._passes.spec, self._prefetched.of(payloads, version)
        if self._is_own_reference and not references:
            there = [None if one is None else one.reference for one in found]
            references = _completed(payloads, there, self._reference_logprobs)
        values: References = ()
        if self._critic is not None:
            there = [None if one is None else one.values for one in found]
            values = _completed(payloads, there, self._critic.values)
        sequences = policy_sequences(
            payloads,
            algorithm,
            spec.max_new_tokens,
            min_versions,
            normaliser,
            references,
            version,
            values,
            teachers,
            spec.policy_id,
            [None if one is None else one.proximal for one in found] if self._recomputes else (),
        )
        missing = [index for index, one in enumerate(sequences) if one.proximal_logprobs is None]
        if not self._recomputes or not missing:
            return sequences
        # Only of loss tokens. Pairs are of the whole batch: part of it has other indices, and a forward needs none.
        rest = [replace(sequences[index], preferred_to=(), unit=None) for index in missing]
        self._count(rest)
        for index, logprobs in zip(missing, self._passes.per_target(rest), strict=True):
            sequences[index] = replace(sequences[index], proximal_logprobs=logprobs.astype(np.float32))
        return sequences

    def forget(self) -> tuple[dict[str, float], float]:
        """Weights moved: `Prefetched.forget`. No metrics where nothing can be prefetched."""
        metrics, seconds = self._prefetched.forget()
        return (metrics if self.are_needed else {}), seconds

    @property
    def _recomputes(self) -> bool:
        return self._algorithm.proximal == "recompute"

    @property
    def _is_own_reference(self) -> bool:
        """The reference is the policy without its adapters."""
        return self._algorithm.needs_reference and bool(self._passes.backend.adapters)

    def _logprobs(self, payloads: Sequence[GroupPayload]) -> list[PerToken]:
        """Per group `[n] float32`, of its n sampled tokens."""
        self._count(sampled_tokens(payloads))
        return self._passes.per_sampled_token(payloads)

    def _reference_logprobs(self, payloads: Sequence[GroupPayload]) -> list[PerToken]:
        """`_logprobs` without adapters."""
        with self._passes.backend.adapters.off():
            return self._logprobs(payloads)

    def _count(self, sequences: Sequence[TrainingSequence]) -> None:
        self._work.computed(sequences, self._passes.plan(sequences).shared_lengths, num_forwards=1)


def _completed(
    payloads: Sequence[GroupPayload],
    there: Sequence[PerToken | None],
    compute: Callable[[Sequence[GroupPayload]], list[PerToken]],
) -> list[PerToken]:
    """What is there, and in its gaps what `compute` says of those groups, all of them in one pass."""
    missing = [payload for payload, one in zip(payloads, there, strict=True) if one is None]
    computed = iter(compute(missing) if missing else ())
    return [next(computed) if one is None else one for one in there]
