"""The optimizer steps of a batch: what is collected while one is open, its result, and the metrics of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.ports import TrainedTokens
from penstock.dataflow.trajectory import GroupPayload, Trajectory, are_equal, rewards_by_baseline
from penstock.trainer.algorithms.metrics import TokenMetrics, TokenSums
from penstock.trainer.algorithms.routing_metrics import RoutingMetrics, RoutingSums
from penstock.trainer.backends.base import OptimizerResult
from penstock.trainer.backends.rank_consistency import RankShare
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.batches.packing import TrainingSequence
from penstock.trainer.batches.samples import group_rewards
from penstock.trainer.config import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, num_steps: int) -> float:
    """Rate of the next optimizer step; `num_steps` were taken before.

    With p the share of the decay that is over, and f = final_lr_ratio:

        steps up to warmup_steps    step / warmup_steps
        up to stable_steps          1                             and all others if decay_steps is 0
        up to decay_steps           cosine       f + (1 − f)·(1 + cos πp) / 2
                                    linear       1 − (1 − f)·p
                                    exponential  f^p
                                    sqrt         1 − (1 − f)·√p
        after it                    f

    times lr. With stable_steps it is WSD, warmup-stable-decay (arXiv 2404.06395, whose decay is exponential; the others
    in arXiv 2405.18392). It follows from the settings and the step alone, so they may change between two steps.
    """
    step, warmup, decay = num_steps + 1, optimizer.warmup_steps, optimizer.decay_steps
    begin = max(warmup, optimizer.stable_steps)
    if step < warmup:
        return optimizer.lr * step / warmup
    if not decay or step <= begin:
        return optimizer.lr
    progress, final = min(1.0, (step - begin) / (decay - begin)), optimizer.final_lr_ratio
    shares = {
        "cosine": final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - (1 - final) * progress,
        "exponential": final**progress,
        "sqrt": 1 - (1 - final) * math.sqrt(progress),
    }
    return optimizer.lr * shares[optimizer.decay]


@dataclass(slots=True)
class OpenOptimizerStep:
    """Accumulated state of one update."""

    metrics: TokenMetrics
    """Sums over all micro-batches so far."""
    share: RankShare | None = None
    """Statistics of this rank for the consistency checks; None if they are not compared with other ranks'."""
    is_first: bool = True
    """Whether the policy is still that of the start of the batch."""
    is_first_epoch: bool = True
    """Whether all its tokens are trained for the first time."""
    learns: bool = True
    """Whether the policy is trained; False while only the critic is (`critic.warmup_steps`)."""
    has_gradient: bool = False
    """Whether any micro-batch had a gradient."""
    normaliser: float = 0.0
    """Sum of the parts' normalisers by which the gradient must still be divided; 0 if already divided."""
    payloads: list[GroupPayload] = field(default_factory=list)
    """Groups of the parts before the last, for the statistics of the batch."""
    micro_batches: list[int] = field(default_factory=list)
    packing_efficiencies: list[float] = field(default_factory=list)
    trained_tokens: dict[TrajectoryId, tuple[NDArray[np.float32], NDArray[np.float32]]] = field(default_factory=dict)
    """Of the recorded trajectories."""
    busy_s: float = 0.0
    """Wall seconds spent on these parts."""
    routing: RoutingMetrics | None = None
    """Of the recorded experts; None of a dense model."""


class TokenRecord:
    """Collects the logprobs of recorded sequences from the micro-batches of one rank.

    Invariant: all ranks make it of the same sequences, so their parts can be summed.
    """

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        self._recorded = [one for one in sequences if one.recorded_as is not None]
        is_recorded = np.array([one.recorded_as is not None for one in sequences], bool)
        counts = np.array([len(one.targets) for one in sequences], np.int64) * is_recorded
        self._starts = np.where(is_recorded, np.cumsum(counts) - counts, -1)
        self._logprobs = np.zeros(int(counts.sum()))  # tokens of other ranks count 0

    def watch(self, target: Tensor, micro_batch: MicroBatch) -> None:
        """Keep the logprobs `[K]` of a micro-batch."""
        count = micro_batch.num_tokens
        starts = self._starts[micro_batch.sequence_index[:count]] if len(self._recorded) else np.empty(0)
        is_recorded = starts >= 0
        if is_recorded.any():  # only then copied from the device
            places = (starts + micro_batch.token_index[:count])[is_recorded]
            self._logprobs[places] = target.detach()[:count].double().cpu().numpy()[is_recorded]

    def gather(self, all_reduce: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> TrainedTokens:
        """Logprobs and advantages by trajectory, over all ranks. Collective, unless nothing is recorded."""
        if not self._recorded:
            return {}
        logprobs, start = all_reduce(self._logprobs), 0
        found: dict[TrajectoryId, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        for one in self._recorded:
            assert one.recorded_as is not None
            name, offset, length = one.recorded_as
            if name not in found:
                found[name] = (np.full(length, np.nan, np.float32), np.full(length, np.nan, np.float32))
            stop = start + len(one.targets)
            found[name][0][offset + one.targets] = logprobs[start:stop]
            found[name][1][offset + one.targets] = 0.0 if one.advantages is None else one.advantages
            start = stop
        return found


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step, equal on all ranks."""

    sums: TokenSums
    loss: float
    """Σ weight · term over its normaliser."""
    lr: float
    """Learning rate."""
    result: OptimizerResult
    micro_batches: Sequence[int]
    """Of this rank, per part."""
    packing_efficiencies: Sequence[float]
    routing: RoutingSums | None = None
    """Of the recorded experts; None of a dense model."""
    is_silent: bool = False
    """Whether no step was taken because nothing had a gradient."""

    @property
    def changed_nothing(self) -> bool:
        """Whether the policy is unchanged."""
        return self.is_silent or self.result.is_skipped


def summary(updates: Sequence[OptimizerStep]) -> dict[str, float]:
    """Metrics of a batch: token means over all its updates, means of loss and norm. Skipped updates are left out.

    If all updates were skipped, they are included.
    """
    shown = [one for one in updates if not one.result.is_skipped] or updates
    sums = shown[0].sums
    for one in shown[1:]:
        sums = sums + one.sums
    routing = [one.routing for one in shown if one.routing is not None]
    counts = [count for one in updates for count in one.micro_batches]
    efficiencies = [share for one in updates for share in one.packing_efficiencies]
    norms = [one.result.grad_norm for one in shown]
    metrics = sums.metrics() | (reduce(add, routing).metrics() if routing else {})
    return metrics | {
        "loss/policy": math.fsum(one.loss for one in shown) / len(shown),
        "loss/grad_norm": sum(norms) / len(norms),
        "loss/lr": updates[-1].lr,
        "trainer/num_micro_batches": float(sum(counts)),
        "trainer/batch_parts": float(len(updates[0].micro_batches)),
        "trainer/updates": float(len(updates)),
        "trainer/skipped_updates": float(sum(one.result.is_skipped for one in updates)),
        "trainer/silent_updates": float(sum(one.is_silent for one in updates)),
        "trainer/packing_efficiency": float(np.average(efficiencies, weights=counts)),
    }


def _cut_turns(trajectory: Trajectory) -> list[bool]:
    """Whether each turn was cut off; a trajectory without an episode is one turn."""
    if trajectory.episode is None:
        return [trajectory.finish_reason == "length"]
    return [turn.finish_reason == "length" for turn in trajectory.episode.turns]


def batch_metrics(payloads: Sequence[GroupPayload]) -> dict[str, float]:
    """Reward, length and episode statistics over all trajectories of the batch; they are the same on every rank."""
    rewards = np.concatenate([group_rewards(payload) for payload in payloads])
    trajectories = [trajectory for payload in payloads for trajectory in payload.trajectories]
    # A group without signal: all rewards that are compared are equal.
    compared = [rewards_by_baseline(payload.trajectories).values() for payload in payloads]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_variance_share": float(np.mean([all(map(are_equal, of_group)) for of_group in compared])),
        "length/mean_tokens": float(np.mean([one.num_sampled_tokens for one in trajectories])),
        "length/max_tokens": float(max(one.num_sampled_tokens for one in trajectories)),
        "length/truncated_share": float(np.mean([is_cut for one in trajectories for is_cut in _cut_turns(one)])),
    }
    for name in dict.fromkeys(name for one in trajectories for name in one.reward_parts):
        values = [one.reward_parts[name] for one in trajectories if name in one.reward_parts]
        metrics[f"reward/part/{name}"] = float(np.mean(values))
    if thought := sum(len(one.reasoning) for one in trajectories):  # in characters
        metrics["length/reasoning_share"] = thought / (thought + sum(len(one.response) for one in trajectories))
    if episodes := [one.episode for one in trajectories if one.episode is not None]:
        of_episodes: dict[str, list[float]] = {
            "env/turns": [len(one.turns) for one in episodes],
            "env/threads": [len({turn.thread for turn in one.turns}) for one in episodes],
            "env/done_share": [one.end == "done" for one in episodes],
            "env/observation_tokens": [sum(turn.num_observation_tokens for turn in one.turns) for one in episodes],
        }
        for name in sorted({name for one in episodes for name in one.counts}):
            of_episodes[f"env/count/{name}"] = [one.counts.get(name, 0.0) for one in episodes]
        metrics |= {name: float(np.mean(values)) for name, values in of_episodes.items()}
    return metrics
