"""What `Run` needs beside its ports: the sections it reads, and instruments that write nothing."""

from __future__ import annotations

from pathlib import Path

from penstock.platform.config.schema import CheckpointConfig, EvaluationConfig, RunConfig
from penstock.platform.observability.event_tail import EventTail
from penstock.platform.observability.hub import MetricsHub
from penstock.platform.observability.memory import MemorySampler
from penstock.platform.run import Instruments
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.parts import NoBadBatches, NoTable
from penstock.trainer.config import OptimizerConfig, TrainerConfig

HELD_OUT_TASKS = 2


def run_config(config: SimulationConfig) -> RunConfig:
    """The sections that `Run` reads; there is no model and no environment to configure."""
    return RunConfig.model_construct(  # type: ignore[call-arg] # the other sections are read by nobody here
        name="simulated",
        total_steps=config.steps,
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=1, optimizer=OptimizerConfig(lr=1.0), max_bad_steps=max(20, config.steps)
        ),
        evaluation=EvaluationConfig(every_steps=config.eval_every, num_tasks_beside=HELD_OUT_TASKS),
        checkpoint=CheckpointConfig(every_steps=config.checkpoint_every),
    )


def instruments() -> Instruments:
    """The real hub without sinks; a memory sampler that is never started; no files."""
    return Instruments(MetricsHub([]), MemorySampler(), NoTable(), NoBadBatches(), Path(), _say_nothing, EventTail())


def _say_nothing(_note: str) -> None:
    return None
