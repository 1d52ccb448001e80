"""How the policy is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OptimizerConfig(BaseModel):
    """AdamW (torch), with linear warm-up to a constant learning rate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    gradient_clip_norm: float = Field(default=1.0, gt=0)


class TrainerConfig(BaseModel):
    """The trainer group.

    Attributes:
        backend: `deepspeed` (any number of ranks) or `torch` (one rank, for tests and tiny runs).
        num_ranks: Processes: data-parallel size x tensor_parallel_size x sequence_parallel_size.
        zero_stage: DeepSpeed ZeRO stage 0..3, over the ranks that hold the same part of every weight.
        tensor_parallel_size: Ranks that split every layer's weights (DeepSpeed AutoTP) and train the same sequences.
        sequence_parallel_size: Ranks that split every sequence (DeepSpeed Ulysses).
        max_tokens_per_micro_batch: Token budget of one forward-backward on one rank.
        max_bad_steps: Skipped steps in a row (non-finite numbers) before the run stops.
        step_timeout_s: Longest wait for one training step, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["deepspeed", "torch"] = "deepspeed"
    num_ranks: int = Field(default=1, ge=1)
    zero_stage: Literal[0, 1, 2, 3] = 0
    tensor_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel_size: int = Field(default=1, ge=1)
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    max_tokens_per_micro_batch: int = Field(gt=0)
    optimizer: OptimizerConfig
    max_bad_steps: int = Field(default=3, ge=1)
    start_timeout_s: float = Field(default=300.0, gt=0)
    step_timeout_s: float = Field(default=1800.0, gt=0)

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train different sequences."""
        return self.num_ranks // (self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def max_group_tokens(self) -> int:
        """Token budget of one forward-backward of the ranks that share sequences."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel_size


class AlgorithmConfig(BaseModel):
    """Advantage, policy loss, behavior correction and aggregation, chosen by name (ALGORITHMS: docs/paper_index.md).

    Attributes:
        clip_low: ε_lo of ppo_clip: the ratio is clipped below 1 − ε_lo.
        clip_high: ε_hi of ppo_clip: the ratio is clipped above 1 + ε_hi.
        correction_cap: Tokens whose behavior weight exceeds it are masked (decoupled).
        std_epsilon: ε added to the group's standard deviation.
        kl_coefficient: β of the divergence from the reference policy in the loss; 0 starts no reference.
        kl_estimator: `k2` (gradient of reverse KL) or `k3` (of forward KL).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    advantage_std: Literal["sample", "population", "none"] = "sample"
    std_epsilon: float = Field(default=1e-4, gt=0)
    loss: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    correction: Literal["none", "decoupled"] = "decoupled"
    correction_cap: float = Field(default=5.0, ge=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "constant_length"] = "token_mean"
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k2", "k3"] = "k2"


class ReferenceConfig(BaseModel):
    """The frozen policy that `algorithm.kl_coefficient` holds the trained one to; started if that is above 0.

    Attributes:
        path: Hugging Face directory or hub name; None is the policy that training starts from.
        num_workers: Processes; each holds the whole policy in float32.
        pool: Pool that they run on; None is the trainer's.
        timeout_s: Longest wait for the logprobs of one group, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    num_workers: int = Field(default=1, ge=1)
    pool: str | None = None
    timeout_s: float = Field(default=600.0, gt=0)


class SftConfig(BaseModel):
    """Supervised warm start (`penstock sft`).

    Attributes:
        batch_size: Examples per optimizer step.
        max_steps: Upper limit of optimizer steps.
        eval_every_steps: Held-out accuracy is measured this often.
        eval_tasks: Held-out tasks per measurement.
        stop_at_accuracy: Stop when one sample answers this share of held-out tasks with the gold answer (the mean
            probability of the whole answer); None trains for `max_steps`.
        max_greedy_accuracy: Kept is the best step at which greedy decoding is no better than this: a warm start
            that leaves reinforcement learning something to show. 1 is no condition.
        reuse: Do nothing where the run directory holds a finished run of the same configuration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(gt=0)
    max_steps: int = Field(gt=0)
    eval_every_steps: int = Field(default=10, gt=0)
    eval_tasks: int = Field(default=256, gt=0)
    stop_at_accuracy: float | None = Field(default=None, gt=0, le=1)
    max_greedy_accuracy: float = Field(default=1.0, gt=0, le=1)
    reuse: bool = False
