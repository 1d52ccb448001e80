"""`penstock sft`: supervised warm start on the task source's own worked answers, with the same trainer as RL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.trajectory import Task
from penstock.envs.contract import GoldSource
from penstock.envs.loading import load_task_source
from penstock.platform.config.schema import RunConfig
from penstock.platform.learning_run import trainer_alone
from penstock.platform.lifecycle import EXIT_OK, run_to_end
from penstock.platform.observability.console import RunConsole, format_duration
from penstock.platform.observability.hub import MetricsHub
from penstock.platform.roles import model_path
from penstock.platform.run_dir import is_finished, prepare_run_dir
from penstock.rollout.tokenizers import NEW_TOKENIZERS, TokenCodec, load_codec
from penstock.trainer.batches.sequences import Example
from penstock.trainer.config import SftConfig


def run_sft(config: RunConfig) -> int:
    """Run `penstock sft` to its end; returns the exit code."""
    sft = config.sft
    assert sft is not None, "checked at the door, as is that the task source knows gold responses"
    if sft.reuse and is_finished(config):
        print(f"{config.run_dir}/policy is there, made by the same configuration: it is used again (sft.reuse=true).")
        return EXIT_OK
    source = cast("GoldSource", load_task_source(config.env, config.seed))
    run_dir = prepare_run_dir(config)
    return run_to_end(lambda: _sft(config, sft, source, run_dir))


async def _sft(config: RunConfig, sft: SftConfig, source: GoldSource, run_dir: Path) -> int:
    console = RunConsole(sft.max_steps)
    path = initial_policy(config, run_dir)
    console.header(
        config.name,
        {
            "policy": f"{path} ({config.model.shape.num_parameters / 1e6:.1f} M parameters)",
            "batch": f"{sft.batch_size} worked examples",
            "stop": "never early" if sft.stop_at_accuracy is None else f"at sampled accuracy {sft.stop_at_accuracy}",
            "run": str(run_dir),
        },
    )
    async with trainer_alone(config, run_dir, path) as (trainer, hub):
        await _learn(trainer, sft, Examples(source, load_codec(path)), hub, console, run_dir / "policy")
    return EXIT_OK


async def _learn(
    trainer: TrainerClient, sft: SftConfig, examples: Examples, hub: MetricsHub, console: RunConsole, policy: Path
) -> None:
    """Optimizer steps until the accuracy is reached or the steps are used up; writes `policy`."""
    held_out = examples.held_out(sft.eval_tasks)
    stream = examples.train()
    rule = StopRule(sft)
    started = time.monotonic()
    for step in range(1, sft.max_steps + 1):
        metrics = await trainer.supervised_step(list(islice(stream, sft.batch_size)))
        if step % sft.eval_every_steps and step != sft.max_steps:
            hub.log(step, metrics)
            continue
        greedy, sampled = await trainer.teacher_forced(held_out)
        hub.log(step, metrics | {"sft/accuracy": greedy, "sft/sampled_accuracy": sampled})
        elapsed = format_duration(time.monotonic() - started)
        scores = f"held-out accuracy {sampled:.3f} sampled, {greedy:.3f} greedy"
        console.note(f"step {step:4d}  loss {metrics['sft/loss']:.4f}  {scores}  {elapsed}")
        if rule.is_best(step, sampled, greedy):
            await trainer.save(str(policy))
        if rule.is_over(sampled):
            break
    if rule.best_step is None:
        await trainer.save(str(policy))
        kept = "the last step: none was within sft.max_greedy_accuracy"
    else:
        kept = f"step {rule.best_step}: {rule.best_sampled:.3f} sampled, {rule.best_greedy:.3f} greedy"
    console.note(f"policy written to {policy} ({kept})")


@dataclass(slots=True)
class StopRule:
    """Which step of the warm start is kept, and when it is over.

    Accuracy jumps up and down from step to step, so the target and the ceiling may never be met by one step.
    Kept is the best sampled accuracy under the ceiling; the end is the target, or twice the target if the
    ceiling was in the way.
    """

    sft: SftConfig
    best_step: int | None = None
    best_sampled: float = -1.0
    best_greedy: float = 0.0

    def is_best(self, step: int, sampled: float, greedy: float) -> bool:
        """Take note of a measurement; True if its policy is the one to keep."""
        if greedy > self.sft.max_greedy_accuracy or sampled <= self.best_sampled:
            return False
        self.best_step, self.best_sampled, self.best_greedy = step, sampled, greedy
        return True

    def is_over(self, sampled: float) -> bool:
        """Whether the kept policy has reached the target, or training has clearly gone past it."""
        target = self.sft.stop_at_accuracy
        return target is not None and (self.best_sampled >= target or sampled >= 2 * target)


class Examples:
    """Worked answers as token ids; the end token is part of the answer."""

    def __init__(self, source: GoldSource, codec: TokenCodec) -> None:
        self._source = source
        self._codec = codec

    def train(self) -> Iterator[Example]:
        for task in self._source.train():
            yield self._encode(task)

    def held_out(self, count: int) -> list[Example]:
        return [self._encode(task) for task in self._source.held_out(count)]

    def _encode(self, task: Task) -> Example:
        response = self._codec.encode_prompt(self._source.gold_response(task))
        return self._codec.encode_prompt(task.prompt), (*response, self._codec.stop_token_ids[0])


def initial_policy(config: RunConfig, run_dir: Path) -> str:
    """Where the warm start begins: `model.path`, or a new random policy of `model.shape` in the run directory."""
    if not config.model.from_scratch:
        return model_path(config)
    from penstock.trainer.tiny_policy import create_policy

    path = str(run_dir / "initial")
    create_policy(config.model, NEW_TOKENIZERS[config.model.tokenizer](), path, config.seed)
    return path
