"""One rank of the trainer: one or several optimizer steps per batch of groups. No Ray.

    forwards without gradient → advantages (whole batch, I9) → per mini-batch: token weights → plan (ranks,
    rows) → forward, loss, backward per micro-batch → clip and update → metrics reduced over ranks

Every rank gets the same groups and takes its own share of the sequences. With one update per batch (the default) the
proximal policy is the target policy before its gradient: proximal = sg(target), no extra forward, ρ ≡ 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.errors import CheckpointError, TrainingError
from penstock.dataflow.ports import StepReport
from penstock.dataflow.trajectory import GroupPayload, Routes, padded_routes
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.controllers import Controllers
from penstock.trainer.algorithms.losses.pairs import DpoConfig, IpoConfig
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import LossFunction, Objective, supervised_loss
from penstock.trainer.algorithms.routing_metrics import RoutingMetrics
from penstock.trainer.backends.base import Backend, OptimizerResult
from penstock.trainer.backends.rank_consistency import RankShare, agreement
from penstock.trainer.batch_builder import BatchBuilder
from penstock.trainer.batches.examples import (
    Example,
    Preference,
    margins_of,
    preference_sequences,
    supervised_sequences,
)
from penstock.trainer.batches.mini_batches import batch_normaliser, mini_batches, split_by_signal
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.checkpoint import CheckpointReader, Counters, TrainerSnapshot
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig
from penstock.trainer.flops import FlopCounter
from penstock.trainer.micro_batches import MicroBatchPasses, TeacherForced
from penstock.trainer.models.critic import Critic
from penstock.trainer.optimizer_steps import (
    OpenOptimizerStep,
    OptimizerStep,
    TokenRecord,
    batch_metrics,
    learning_rate,
    summary,
)
from penstock.trainer.spec import TrainerSpec
from penstock.trainer.step_stop import StepStop
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.adapters import adapter_tensors

HeldWeights = Mapping[str, Mapping[str, Tensor]]
"""Prefix of a checkpoint, `model` or `critic` -> `Backend.held_weights`."""
_OF_POLICIES = ("ratio/", "mismatch/", "loss/reference_kl", "loss/teacher_kl")
"""Metrics that compare policies; supervised steps do not report them."""


class PolicyTrainer:
    """Trains one policy through a `Backend`. Collective: all ranks make the same calls with the same arguments.

    Attributes:
        stop: Ends the running step before it changes the weights.
    """

    def __init__(self, backend: Backend, spec: TrainerSpec, flops: FlopCounter, critic: Critic | None = None) -> None:
        self.backend = backend
        self.critic = critic
        self._spec = spec
        self._algorithm = Algorithm(spec.algorithm)
        self._passes = MicroBatchPasses(backend, spec)
        self._builder = BatchBuilder(self._passes, critic, flops, self._algorithm)
        self._flops = flops
        self._objective = Objective(self._algorithm)
        self._controllers = Controllers(spec.algorithm)
        self._optimizer = spec.trainer.optimizer
        self._num_steps = 0
        self._streamed: OpenOptimizerStep | None = None
        self._snapshot: TrainerSnapshot | None = None
        self._copy_wait_s: float | None = None
        self._version = 0
        self._before_update: tuple[int, HeldWeights] | None = None
        self.stop = StepStop()

    def set_learning_rate(self, settings: Mapping[str, Any]) -> None:
        """Take the rate of further steps from these settings of `OptimizerConfig`; its other ones stay."""
        self._optimizer = OptimizerConfig(**settings)

    def step(self, payloads: Sequence[GroupPayload], version: int) -> StepReport:
        """Train one batch, or after `accumulate` its last part, with the gradient and report of the whole batch (I9).

        The normaliser of a batch in parts is known only now, so the sum of gradients is divided before it is clipped.
        If a batch is several updates, each has its own normaliser; one that is not finite is skipped.

        Args:
            payloads: The batch's groups with rewards, and with logprobs of the reference and the teacher if the
                algorithm needs them (`AlgorithmConfig.needs_reference`, `.needs_teacher`). With adapters the reference
                is the policy without them.
            version: Policy version before the step.

        Returns:
            version + 1 and metrics, or the same version if all updates that had a gradient were skipped.
        """
        start = time.perf_counter()
        self.stop.begin()
        self._version, self._before_update = version, None
        streamed, self._streamed = self._streamed, None
        share = self._share() if streamed is None else streamed.share
        learns = self.critic is None or version >= self.critic.warmup_steps
        if streamed is not None:
            sequences = self._builder.build(payloads, version, normaliser=1.0)
            self._add(streamed, sequences, is_last=True)
            updates = [self._update(streamed)]
            trained_tokens = streamed.trained_tokens
            metrics = summary(updates) | batch_metrics([*streamed.payloads, *payloads])
        else:
            sequences = self._builder.build(payloads, version)
            updates, trained_tokens = [], {}
            num_updates = self._algorithm.config.mini_batches * self._algorithm.config.epochs
            pace = None if self.critic is None else self.critic.pace
            limit = self._spec.max_new_tokens
            for part in mini_batches(sequences, len(payloads), self._algorithm, limit, version):
                is_first = all(one.changed_nothing for one in updates)
                is_first_epoch = len(updates) < self._algorithm.config.mini_batches
                opened = self._open(share, is_first=is_first, is_first_epoch=is_first_epoch)
                opened.learns = learns
                self._backward(opened, part, self._objective, is_last=True)
                is_last = len(updates) + 1 == num_updates
                num_of_critic = 0 if pace is None else pace.num_next
                updates.append(self._update(opened, is_last=is_last and not num_of_critic))
                trained_tokens |= opened.trained_tokens
                num_taken = 0
                for num_left in reversed(range(num_of_critic)):
                    assert self.critic is not None, "only a critic has a pace"
                    self._prepare_update(is_last=False)
                    num_taken += self.critic.update(part, self.stop, is_last=is_last and not num_left)
                pace = None if pace is None else pace.after(num_taken)
            metrics = summary(updates) | batch_metrics(payloads)
            if self.critic is not None and pace is not None:
                self.critic.pace = pace
                metrics |= self.critic.take_metrics(sequences)
        if not self._algorithm.needs_reference:
            metrics.pop("loss/reference_kl", None)
        if not self._algorithm.needs_teacher:
            metrics.pop("loss/teacher_kl", None)
        is_skipped = any(one.result.is_skipped for one in updates) and all(one.changed_nothing for one in updates)
        metrics |= self._controllers.metrics()
        if learns and not is_skipped:  # else the policy stays as it is, so nothing follows the coefficients
            self._controllers.observe(metrics)
            self._use(self._controllers.algorithm)
        if is_skipped or not self._spec.has_partner:
            self._before_update = None
        early_logprobs, ahead_s = self._builder.forget()
        metrics |= early_logprobs if share is None else agreement(share, self.backend) | early_logprobs
        if self._copy_wait_s is not None:
            metrics["checkpoint/copy_wait_s"], self._copy_wait_s = self._copy_wait_s, None
        metrics["trainer/step_s"] = step_s = time.perf_counter() - start + (streamed.busy_s if streamed else 0.0)
        busy_s = step_s + ahead_s
        metrics |= self._flops.take(busy_s)
        told = trained_tokens if self.backend.rank == 0 else {}
        return StepReport(version if is_skipped else version + 1, is_skipped, metrics, busy_s, told)

    def accumulate(self, payloads: Sequence[GroupPayload], version: int) -> None:
        """Add the gradient of a part of a batch, while the rest is still being generated; `step` ends the batch.

        Args:
            payloads: As in `step`, of a part of the batch.
            version: As in `step`.

        Raises:
            TrainingError: If something needs the whole batch: several updates, a critic, or the mean over the answers
                that pass.
        """
        algorithm, why = self._algorithm.config, ""
        if self.critic is not None:
            why = f"algorithm.advantage={algorithm.advantage.name} has a critic and takes"
        elif algorithm.updates_per_batch > 1:
            why = f"a batch is {algorithm.updates_per_batch} updates (algorithm.mini_batches x epochs) and takes"
        elif algorithm.imitates_passing:
            why = f"algorithm.nll_coefficient={algorithm.nll_coefficient:g} averages over the answers that pass in"
        if why:
            raise TrainingError(
                f"trainer: a part of a batch was sent, but {why} whole batches. Use "
                "dataflow.stream_micro_batches=false."
            )
        start = time.perf_counter()
        if self._streamed is None:
            self.stop.begin()
            self._streamed = self._open(self._share())
        streamed = self._streamed
        sequences = self._builder.build(payloads, version, normaliser=1.0)
        self._add(streamed, sequences, is_last=False)
        streamed.payloads.extend(payloads)
        streamed.busy_s += time.perf_counter() - start

    def early_logprobs(self, payloads: Sequence[GroupPayload], version: int) -> None:
        """Compute forwards for groups of an incomplete batch; the gradient and the report of the step stay the same."""
        self._builder.ahead(payloads, version)

    def supervised_step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One step on the mean of −logprob over all response tokens of the batch.

        Args:
            examples: (prompt ids, response ids) each; a response contains its end token, if there is one.
        """
        start = time.perf_counter()
        self.stop.begin()
        self._builder.forget()
        opened = self._open()
        self._backward(opened, supervised_sequences(examples), supervised_loss, is_last=True)
        metrics = summary([self._update(opened)])
        kept = {name: value for name, value in metrics.items() if not name.startswith(_OF_POLICIES)}
        kept["sft/loss"] = kept.pop("loss/policy")
        kept["trainer/step_s"] = time.perf_counter() - start
        return kept | self._flops.take(kept["trainer/step_s"])

    def preference_step(
        self, pairs: Sequence[Preference], reference_logprobs: Sequence[NDArray[np.float32]] | None = None
    ) -> dict[str, float]:
        """One step on the mean of the pair loss: DPO of a policy, Bradley-Terry of a reward model.

        Args:
            pairs: The pairs of the batch.
            reference_logprobs: `preference_logprobs` of the frozen reference; None for a reward model.
        """
        start = time.perf_counter()
        self.stop.begin()
        self._builder.forget()
        opened = self._open()
        sequences = preference_sequences(pairs, self._spec.kind, self._algorithm, reference_logprobs)
        self._backward(opened, sequences, self._objective, is_last=True)
        metrics = summary([self._update(opened)])
        names = (
            "loss/grad_norm",
            "loss/lr",
            "trainer/num_micro_batches",
            "trainer/packing_efficiency",
            "trainer/skipped_updates",
        )
        kept = {name: metrics[name] for name in names}
        step_s = time.perf_counter() - start
        return kept | {"preference/loss": metrics["loss/policy"], "trainer/step_s": step_s} | self._flops.take(step_s)

    def preference_margins(self, pairs: Sequence[Preference]) -> NDArray[np.float64]:
        """`[P]`: margin of the chosen over the rejected answer: scores, or sums or means of logprobs as in the loss."""
        loss = self._algorithm.loss_settings
        return margins_of(
            self._preference_values(pairs), per_token=isinstance(loss, DpoConfig | IpoConfig) and loss.length == "mean"
        )

    def preference_logprobs(self, pairs: Sequence[Preference]) -> list[NDArray[np.float32]]:
        """`[n]` per answer, chosen and rejected alternating: the policy's logprob of each of its n tokens."""
        return [values.astype(np.float32) for values in self._preference_values(pairs)]

    def _preference_values(self, pairs: Sequence[Preference]) -> list[NDArray[np.float64]]:
        return self._passes.per_target(preference_sequences(pairs, self._spec.kind, self._algorithm))

    def teacher_forced(self, examples: Sequence[Example]) -> TeacherForced:
        """Measure examples without sampling: what greedy decoding and one sample would answer."""
        return self._passes.teacher_forced(supervised_sequences(examples))

    def token_logprobs(self, examples: Sequence[Example], routes: Sequence[Routes | None] = ()) -> NDArray[np.float64]:
        """`[n] float64`: of all n response tokens, one example after another, at the sampling temperature; `routes` as
        the engine recorded them of each example.
        """
        sequences = supervised_sequences(examples)
        for index, of_example in enumerate(routes):
            if of_example is not None:
                whole = padded_routes(of_example, len(sequences[index].token_ids))
                sequences[index] = replace(sequences[index], routes=whole)
        return np.concatenate(self._passes.per_target(sequences))

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """HF name and full tensor of every parameter. Collective: all ranks exhaust it, rank 0 yields."""
        return self.backend.export_weights()

    def training_sharding(self) -> TrainingSharding:
        """The published tensors, and how the ranks share them."""
        return self.backend.training_sharding()

    def local_weights(self) -> dict[str, Tensor]:
        """HF name -> this rank's part of the tensor, flat; aliases of live weights."""
        return self.backend.local_weights()

    def base_weights(self) -> dict[str, Tensor]:
        """`local_weights` without adapters. Collective."""
        with self.backend.adapters.off():
            return self.backend.local_weights()

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of the additions to the engines' weights, on every rank. Collective."""
        for name, adapter in self.backend.gathered_adapters().items():
            yield from adapter_tensors(name, adapter.down, adapter.scale * adapter.up)

    def held_weights(self, version: int | None = None) -> HeldWeights:
        """This rank's parts of a version. Not collective; after `stop` also from another thread, in a step.

        Args:
            version: That before the step or after it; None: what the weights are now.
        """
        if self._before_update is not None and self._before_update[0] == version:
            return self._before_update[1]
        return {prefix: one.held_weights() for prefix, one in self.backends().items()}

    def snapshot(self, version: int) -> TrainerSnapshot:
        """Begin to copy this rank's share of the state to host memory. Not collective.

        Between steps, or after `stop` in a step; the next optimizer step waits until it is copied.

        Raises:
            CheckpointError: If a part of the updates of a batch was made.
        """
        if self._before_update is not None and self._before_update[0] == version and self.stop.has_updated:
            raise CheckpointError(
                f"trainer: v{version} cannot be kept as a checkpoint: its next step was ended between two of its "
                "updates (algorithm.mini_batches x epochs). Its policy is saved; a resume uses an earlier checkpoint."
            )
        backends = self.backends()
        num_steps = {"model": self._num_steps}
        if self.critic is not None:
            num_steps["critic"] = self.critic.num_steps
        pace = {} if self.critic is None else self.critic.pace._asdict()
        counters = Counters(version, num_steps, self._spec.trainer.num_ranks, dict(self._controllers.state), pace)
        self._snapshot = TrainerSnapshot({prefix: one.fragments() for prefix, one in backends.items()}, counters)
        return self._snapshot

    def restore(self, folder: str) -> int:
        """Continue from the trainer that was saved, of any backend and number of ranks. Collective.

        Args:
            folder: With the files of all its ranks, on every rank.

        Returns:
            Its policy version.

        Raises:
            CheckpointError: If a file is missing, torn or of a newer format, or if this trainer has another model.
        """
        reader = CheckpointReader(folder)
        if self.critic is None:
            reader.check_model("critic", {}, {})
        for prefix, backend in self.backends().items():
            backend.restore(reader, prefix)
        self._num_steps = reader.counters.num_steps["model"]
        if self.critic is not None:
            self.critic.num_steps = reader.counters.num_steps["critic"]
            self.critic.pace = self.critic.pace.restored(reader.counters.critic_pace)
        self._controllers.restore(reader.counters.coefficients)
        self._use(self._controllers.algorithm)
        torch.set_rng_state(reader.random_state(self.backend.rank))
        return reader.counters.version

    def _use(self, algorithm: AlgorithmConfig) -> None:
        """Train the next step with the coefficients of `algorithm`."""
        if algorithm is not self._algorithm.config:
            self._algorithm = Algorithm(algorithm)
            self._builder.use(self._algorithm)
            self._objective = Objective(self._algorithm)

    def backends(self) -> dict[str, Backend]:
        """What is trained, by its prefix in a checkpoint."""
        return {"model": self.backend} | ({} if self.critic is None else {"critic": self.critic.backend})

    def close(self) -> None:
        """Leave the process group."""
        self.backend.close()
        if self.critic is not None:
            self.critic.backend.close()

    def _open(
        self, share: RankShare | None = None, *, is_first: bool = True, is_first_epoch: bool = True
    ) -> OpenOptimizerStep:
        """Return an update without gradient; `share` is None for steps that are not compared over ranks."""
        has_reference = self._algorithm.needs_reference or self._algorithm.needs_teacher
        metrics = TokenMetrics(self.backend.device, self._algorithm.metrics, has_reference=has_reference)
        experts = self.backend.experts
        routing = None if experts is None else RoutingMetrics(experts, self.backend.device)
        return OpenOptimizerStep(metrics, share, is_first, is_first_epoch, routing=routing)

    def _share(self) -> RankShare | None:
        """What this rank compares with the others after the batch; None if there are no others."""
        has_others = self.backend.data_parallel_size * self.backend.sequence_parallel_size > 1
        return RankShare.at_start(self.backend) if has_others else None

    def _add(self, opened: OpenOptimizerStep, sequences: Sequence[TrainingSequence], *, is_last: bool) -> None:
        """Add a part of a batch whose normaliser is known only at its end."""
        opened.normaliser += batch_normaliser(sequences, self._algorithm)
        self._backward(opened, sequences, self._objective, is_last=is_last)

    def _backward(
        self,
        opened: OpenOptimizerStep,
        sequences: Sequence[TrainingSequence],
        loss_function: LossFunction,
        *,
        is_last: bool,
    ) -> None:
        """Run forward and backward over these sequences by micro-batch; only forward over those whose gradient is 0."""
        experts, balance = self.backend.experts, self._algorithm.config.balance_coefficient
        balance = balance if experts is not None and loss_function is self._objective else 0.0
        if experts is not None:
            experts.is_balanced = balance > 0
        heard: Sequence[TrainingSequence] = sequences
        silent: Sequence[TrainingSequence] = []
        if loss_function is self._objective:
            heard, silent = self._by_signal(sequences) if opened.learns else ([], sequences)
        # The last part completes the gradient of the earlier parts, even if its own gradient is 0 or it is empty.
        completes = is_last and opened.has_gradient
        if completes and not heard:
            heard, silent = silent, []
        parts = [(heard, True)] if heard or completes else []
        if silent or not parts:
            parts.insert(0, (silent, False))
        counts, efficiencies, silent_loss = [], [], torch.zeros((), device=self.backend.device)
        for part, learns in parts:
            plan = self._passes.plan(part)
            if learns:
                opened.has_gradient = True
                self._flops.trained(part, plan.shared_lengths)
            else:
                self._flops.computed(part, plan.shared_lengths, num_forwards=1)
            counts.append(len(plan.ranks[self.backend.data_parallel_rank]))
            efficiencies.append(plan.efficiency)
            record = TokenRecord(part if opened.is_first_epoch else ())
            # Also without a gradient the model is in training mode, in which it returns entropies.
            with torch.set_grad_enabled(learns):
                for position, micro_batch in enumerate(self._passes.micro_batches(part, plan)):
                    self.stop.check()
                    target, entropies = self.backend.forward(micro_batch.inputs, self._spec.temperature)
                    if opened.share is not None:
                        opened.share.watch(target)
                    record.watch(target, micro_batch)
                    if opened.routing is not None:
                        opened.routing.add(micro_batch, opened.metrics)
                    loss = loss_function(target, entropies, micro_batch, opened)
                    if learns:
                        if balance and opened.routing is not None:
                            of_experts = opened.routing.balance_loss(micro_batch)
                            loss = loss + balance * micro_batch.token_weights.sum() * of_experts
                        # If it is not finite, a loss without gradient makes this a bad step, too.
                        loss = loss + 0.0 * silent_loss
                        self.backend.backward(loss, is_last=is_last and position == counts[-1] - 1)
                    else:
                        silent_loss = silent_loss + loss
            opened.trained_tokens |= record.gather(partial(self.backend.all_reduce, operation="sum"))
        opened.micro_batches.append(sum(counts))
        opened.packing_efficiencies.append(float(np.average(efficiencies, weights=counts)))

    def _by_signal(
        self, sequences: Sequence[TrainingSequence]
    ) -> tuple[Sequence[TrainingSequence], Sequence[TrainingSequence]]:
        """Sequences that need a backward pass, and those that need none.

        The groups without a gradient (`has_signal`) are not split off where that would not save a micro-batch.
        """
        heard, silent = split_by_signal(sequences, self._algorithm)
        if heard and silent:
            with_heard, with_all = (len(self._passes.plan(some).ranks[0]) for some in (heard, sequences))
            if with_heard == with_all:
                return sequences, []
        return heard, silent

    def _update(self, opened: OpenOptimizerStep, *, is_last: bool = True) -> OptimizerStep:
        """The optimizer step, if there is a gradient, unless the run ends; `is_last`: of its batch."""
        self._prepare_update(is_last=is_last)
        self.stop.decide(self.backend.all_reduce, is_last=is_last, changes=opened.has_gradient)
        if opened.share is not None:
            opened.share.add(*opened.metrics.local())
        sums = opened.metrics.reduce(self.backend.all_reduce)
        routing = None if opened.routing is None else opened.routing.reduce(self.backend.all_reduce)
        normaliser = max(opened.normaliser, 1.0)
        if self._algorithm.config.correction.renormalize != "none" and sums.kept_share > 0:
            normaliser *= sums.kept_share
        lr = learning_rate(self._optimizer, self._num_steps)
        counts, efficiencies, loss = opened.micro_batches, opened.packing_efficiencies, sums.loss / normaliser
        if not opened.has_gradient:
            nothing = OptimizerResult(0.0, is_skipped=not math.isfinite(loss))
            return OptimizerStep(sums, loss, lr, nothing, counts, efficiencies, routing, not nothing.is_skipped)
        self.backend.set_lr(lr)
        result = self.backend.optimizer_step(normaliser)
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize()  # saving reads the weights from another stream
        self._num_steps += not result.is_skipped
        return OptimizerStep(sums, loss, lr, result, counts, efficiencies, routing)

    def _prepare_update(self, *, is_last: bool) -> None:
        """Call it before each update of a step, and before `stop.decide`, from where on the step must end soon.

        An update changes what a snapshot still copies. Before another update, and before the last one where a partner
        may not complete its step, the weights are copied: from then on they may be those of no published version.
        """
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            self._copy_wait_s = snapshot.wait()
        if self._before_update is None and (not is_last or self._spec.has_partner):
            self._before_update = self._version, on_cpu(self.held_weights(), self.backend.device)


def on_cpu(held: HeldWeights, device: torch.device, *, copies: bool = True) -> HeldWeights:
    """The parts in host memory, copied beside what the device computes.

    Args:
        held: `PolicyTrainer.held_weights`.
        device: That the rank computes on.
        copies: Also those that are in host memory, each into a storage of its own, which is what is sent.
    """
    with beside_the_step(device):
        return {prefix: {name: one.to("cpu", copy=copies) for name, one in of.items()} for prefix, of in held.items()}


def beside_the_step(device: torch.device) -> AbstractContextManager[object]:
    """Within it, work on a GPU does not wait for that of a step, in which a collective may never end."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
