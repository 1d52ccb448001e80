"""The critic of gae: a separate model that predicts returns, trained next to the policy on the same ranks.

    values of all sampled tokens (start of the batch) → advantages and returns → `Pace.due` updates per policy update

Shape legend: n_i sampled tokens of a trajectory, K loss tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.algorithms.losses.value import value
from penstock.trainer.algorithms.tokens import LossTokens
from penstock.trainer.backends.base import Backend
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.batches.samples import after_cut
from penstock.trainer.config import CriticConfig
from penstock.trainer.flops import FORWARD_AND_BACKWARD, FlopCounter
from penstock.trainer.micro_batches import MicroBatchPasses
from penstock.trainer.optimizer_steps import learning_rate
from penstock.trainer.spec import TrainerSpec
from penstock.trainer.step_stop import StepStop


class Pace(NamedTuple):
    """How many updates of the critic follow each update of the policy (`critic.updates_per_policy_update`, PQL's β).

    Invariant: after p updates of the policy, floor(p · ratio) of the critic were due. An update of the policy is one of
    its mini-batches, also if it was skipped, had no gradient, or was in the critic's warm-up.
    """

    ratio: float
    """Updates of the critic per update of the policy."""
    policy_updates: int = 0
    """Updates of the policy, since the run has this ratio."""
    due: int = 0
    """Updates of the critic that followed them."""
    taken: int = 0
    """Those of them that changed the critic."""

    @property
    def num_next(self) -> int:
        """Updates of the critic that follow the next update of the policy."""
        # The margin is above the rounding of the product: ten times 0.1 is one.
        return int((self.policy_updates + 1) * self.ratio + 1e-9) - self.due

    def after(self, taken: int) -> Self:
        """The pace after the next update of the policy, if `taken` of the critic's updates were not skipped."""
        return self._replace(
            policy_updates=self.policy_updates + 1, due=self.due + self.num_next, taken=self.taken + taken
        )

    def restored(self, saved: Mapping[str, float]) -> Self:
        """The pace of a checkpoint; unchanged if that is of another ratio, or had none."""
        if saved.get("ratio") != self.ratio:
            return self
        return self._replace(**{name: int(count) for name, count in saved.items() if name != "ratio"})


class Critic:
    """One rank's critic. Collective: all ranks make the same calls with the same arguments.

    Attributes:
        num_steps: Optimizer steps taken; they decide the learning rate.
        warmup_steps: Batches at the start that train the critic only.
        pace: How many updates follow the policy's next one. It changes at the end of a batch.
    """

    def __init__(self, backend: Backend, spec: TrainerSpec, config: CriticConfig, flops: FlopCounter) -> None:
        self.backend = backend
        self._config = config
        self._passes = MicroBatchPasses(backend, spec)
        self._flops = flops
        self.num_steps = 0
        self.warmup_steps = config.warmup_steps
        self.pace = Pace(config.updates_per_policy_update)
        self._updates: list[NDArray[np.float64]] = []  # [loss, clipped tokens, tokens, gradient norm] of each
        self._num_skipped = 0

    def values(self, payloads: Sequence[GroupPayload]) -> list[NDArray[np.float32]]:
        """Per group `[n] float32`: V before each of its sampled tokens, members one after another."""
        return self._passes.per_sampled_token(payloads, self._flops)

    def cut_values(self, payloads: Sequence[GroupPayload]) -> list[NDArray[np.float32]]:
        """Per group `[S] float32`, S threads: V after the last token of those that were cut off, else 0.

        One more forward pass over the answers that were cut off.
        """
        of_groups = [after_cut(payload) for payload in payloads]
        cut = [one for sequences in of_groups for one in sequences if one is not None]
        found = iter(self._passes.per_target(cut, self._flops) if cut else ())
        return [
            np.array([0.0 if one is None else next(found)[0] for one in sequences], np.float32)
            for sequences in of_groups
        ]

    def update(self, sequences: Sequence[TrainingSequence], stop: StepStop, *, is_last: bool) -> bool:
        """One optimizer step towards the returns of these sequences; skipped if anything is not finite.

        Args:
            sequences: Of the mini-batch.
            stop: Ends the step.
            is_last: Whether it is the last update of the batch.

        Returns:
            Whether it was not skipped.
        """
        plan = self._passes.plan(sequences)
        self._flops.computed(sequences, plan.shared_lengths, num_forwards=FORWARD_AND_BACKWARD)
        count = len(plan.ranks[self.backend.data_parallel_rank])
        totals = torch.zeros(3, dtype=torch.float64, device=self.backend.device)
        for position, micro_batch in enumerate(self._passes.micro_batches(sequences, plan)):
            stop.check()
            values, _ = self.backend.forward(micro_batch.inputs, temperature=1.0)
            zeros = torch.zeros_like(values, requires_grad=False)  # logprobs, which this loss does not read
            tokens = LossTokens(
                target=values,
                proximal=zeros,
                behavior=zeros,
                reference=zeros,
                advantages=micro_batch.advantages,
                segments=micro_batch.segments,
                num_segments=micro_batch.num_segments,
                pairs=micro_batch.pairs,
                values=values,
                old_values=zeros if micro_batch.old_values is None else micro_batch.old_values,
                returns=zeros if micro_batch.returns is None else micro_batch.returns,
            )
            found = value(tokens, self._config)
            loss = (found.terms * micro_batch.token_weights).sum()
            self.backend.backward(loss, is_last=position == count - 1)
            if micro_batch.num_tokens:
                num_clipped = (found.is_clipped_low | found.is_clipped_high).sum()
                totals += torch.stack(
                    [loss.detach().double(), num_clipped.double(), totals.new_tensor(len(found.terms))]
                )
        stop.decide(self.backend.all_reduce, is_last=is_last)
        self.backend.set_lr(learning_rate(self._config.optimizer, self.num_steps))
        result = self.backend.optimizer_step()
        totals_of_all = self.backend.all_reduce(totals.cpu().numpy(), "sum")
        if result.is_skipped:
            self._num_skipped += 1
            return False
        self.num_steps += 1
        self._updates.append(np.append(totals_of_all, result.grad_norm))
        return True

    def take_metrics(self, sequences: Sequence[TrainingSequence]) -> dict[str, float]:
        """Metrics of the updates since the last call; `sequences` are those of the whole batch.

        Explained variance is `1 − Var(ret − V) / Var(ret)` with V from before the updates, over all loss tokens.
        """
        updates, self._updates = self._updates, []
        num_skipped, self._num_skipped = self._num_skipped, 0
        old = np.concatenate([np.zeros(0), *(one.old_values for one in sequences if one.old_values is not None)])
        returns = np.concatenate([np.zeros(0), *(one.returns for one in sequences if one.returns is not None)])
        metrics = {"critic/skipped_updates": float(num_skipped), "critic/updates": float(len(updates))}
        metrics["critic/updates_per_policy_update"] = self.pace.taken / max(self.pace.policy_updates, 1)
        if len(returns):
            spread = float(returns.var())
            metrics["critic/mean_value"] = float(old.mean())
            metrics["critic/mean_return"] = float(returns.mean())
            metrics["critic/explained_variance"] = 1.0 - float((returns - old).var()) / spread if spread > 0 else 0.0
        if updates:
            loss, clipped, tokens, grad_norm = np.sum(updates, axis=0).tolist()
            metrics["critic/loss"] = loss / len(updates)
            metrics["critic/clip_share"] = clipped / max(tokens, 1.0)
            metrics["critic/grad_norm"] = grad_norm / len(updates)
        return metrics
