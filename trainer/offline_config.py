"""Learning from given answers: `penstock sft`, and `penstock rm` and `penstock dpo` from pairs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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


class PreferenceConfig(BaseModel):
    """Learning from pairs of answers (`penstock rm`, `penstock dpo`).

    Attributes:
        batch_size: Pairs per optimizer step.
        num_steps: Optimizer steps.
        eval_every_steps: Held-out accuracy is measured this often.
        eval_pairs: Held-out pairs per measurement.
        beta: β of DPO; a reward model has 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(gt=0)
    num_steps: int = Field(gt=0)
    eval_every_steps: int = Field(default=10, gt=0)
    eval_pairs: int = Field(default=256, gt=0)
    beta: float = Field(default=0.1, gt=0)
