"""Everything that one trainer process needs to start. Plain data: importing it loads no torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

from penstock.dataflow.ids import POLICY, PolicyId
from penstock.trainer.config import AlgorithmConfig, CriticConfig, TrainerConfig
from penstock.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """What all ranks share.

    Attributes:
        model_path: Hugging Face directory (or hub name) of the policy at version 0.
        temperature: The sampling temperature; the trainer's logprobs use the same. 1 where given answers are trained.
        max_new_tokens: The sampling limit, for `constant_length` aggregation and the truncated share.
        threads: CPU threads of each rank.
        publish_in: Parent of the folder for published versions; None: shared memory.
        kind: What the ranks train; a reward model by preferences only.
        restore_from: Folder of a checkpoint's trainer files to continue from; None: start from `model_path`.
        policy_id: Which policy of the run is trained.
        has_partner: Whether there are two.
        critic: The critic of gae; None without one.
        pass_reward: Reward from which an answer passes, for `algorithm.nll_coefficient`.
        record_every: The tokens of one group in so many are reported with a step; 0: of none.
        profile_in: Folder for the profiles of `trainer.profile_steps`.
        shares_devices: Whether engines use the ranks' devices between their calls (colocated).
    """

    model_path: str
    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    device: Literal["cpu", "cuda"]
    threads: int
    seed: int
    temperature: float
    max_new_tokens: int
    publish_in: str | None = None
    profile_in: str = "profiles"
    shares_devices: bool = False
    critic: CriticConfig | None = None
    kind: Literal["policy", "reward"] = "policy"
    policy_id: PolicyId = POLICY
    has_partner: bool = False
    restore_from: str | None = None
    record_every: int = 0
    pass_reward: float = 1.0


@dataclass(frozen=True, slots=True)
class FrozenPolicySpec:
    """What a process with a frozen policy needs to start."""

    path: str
    """Hugging Face directory or hub name."""
    model: ModelConfig
    device: Literal["cpu", "cuda"]
    threads: int
    max_tokens: int
    """Padded tokens of one forward."""
    temperature: float
    """The sampling temperature."""
    replays_routes: bool = True
    """Tokens go to the experts that the engines recorded: it is the policy of an earlier time."""
    offloads: bool = False
    """Its parameters are in host memory between uses."""


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
