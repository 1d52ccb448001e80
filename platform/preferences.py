"""`penstock rm` and `penstock dpo`: learning from pairs of answers, with the same trainer as RL."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.dataflow.trajectory import Task
from penstock.envs.contract import TaskSource
from penstock.envs.loading import load_task_source
from penstock.envs.preferences import preferred_pair
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.learning_run import trainer_alone
from penstock.platform.lifecycle import EXIT_OK, run_to_end
from penstock.platform.observability.console import RunConsole, format_duration
from penstock.platform.observability.hub import MetricsHub
from penstock.platform.roles import model_path
from penstock.platform.run_dir import prepare_run_dir
from penstock.rollout.tokenizers import TokenCodec, load_codec
from penstock.trainer.batches.sequences import ModelKind, Preference
from penstock.trainer.config import AlgorithmConfig, PreferenceConfig


def run_preferences(config: RunConfig, kind: ModelKind) -> int:
    """Run either command to its end; returns the exit code."""
    assert config.preference is not None, "checked at the door"
    beta = config.preference.beta if kind == "policy" else 1.0
    pairs = AlgorithmConfig(loss="online_dpo", correction=("none",), pair_beta=beta)
    paired = config.model_copy(update={"algorithm": pairs})
    run_dir = prepare_run_dir(config)
    return run_to_end(lambda: _run(paired, config.preference, kind, run_dir))  # type: ignore[arg-type]


async def _run(config: RunConfig, preference: PreferenceConfig, kind: ModelKind, run_dir: Path) -> int:
    console = RunConsole(preference.num_steps)
    path = model_path(config)
    facts = {
        "model": f"{'reward model' if kind == 'reward' else 'policy'} from {path}",
        "batch": f"{preference.batch_size} pairs",
        "run": str(run_dir),
    }
    console.header(config.name, facts)
    source, codec = load_task_source(config.env, config.seed), load_codec(path)
    wanted = preference.batch_size * preference.num_steps
    limit = config.model.max_context_tokens
    pairs = encoded(source, codec, islice(source.train(), wanted), limit)
    held_out = encoded(source, codec, source.held_out(preference.eval_pairs), limit)
    command: Command = "dpo" if kind == "policy" else "rm"
    async with trainer_alone(config, run_dir, path, kind, command) as (trainer, hub):
        folder = str(run_dir / ("policy" if kind == "policy" else "reward_model"))
        try:
            await _learn(trainer, preference, kind, pairs, held_out, hub, console)
        except BaseException:
            with suppress(PenstockError):  # what stopped the run is told, not that a dead rank cannot save either
                await trainer.save(folder)
            raise
        await trainer.save(folder)
    return EXIT_OK


async def _learn(
    trainer: TrainerClient,
    preference: PreferenceConfig,
    kind: ModelKind,
    pairs: list[Preference],
    held_out: list[Preference],
    hub: MetricsHub,
    console: RunConsole,
) -> None:
    """All steps; the frozen reference of DPO is what the policy says before the first of them."""
    started, size = time.monotonic(), preference.batch_size
    references = await trainer.preference_logprobs(pairs) if kind == "policy" else None
    start = await trainer.preference_margins(held_out) if kind == "policy" else np.zeros(len(held_out))
    for step in range(1, preference.num_steps + 1):
        first, last = (step - 1) * size, step * size
        of_batch = None if references is None else references[2 * first : 2 * last]
        metrics = await trainer.preference_step(pairs[first:last], of_batch)
        if step % preference.eval_every_steps == 0 or step == preference.num_steps:
            accuracy = float(np.mean(await trainer.preference_margins(held_out) > start))
            metrics = metrics | {"preference/accuracy": accuracy}
            elapsed = format_duration(time.monotonic() - started)
            loss = f"loss {metrics['preference/loss']:.4f}"
            console.note(f"step {step:4d}  {loss}  held-out accuracy {accuracy:.3f}  {elapsed}")
        hub.log(step, metrics)


def encoded(source: TaskSource, codec: TokenCodec, tasks: Iterable[Task], max_tokens: int) -> list[Preference]:
    """Pairs as token ids; the end token is part of an answer.

    Raises:
        ConfigError: If a task has no pair, or one of more than `max_tokens`.
    """
    end = codec.stop_token_ids[0]
    found = []
    for task in tasks:
        try:
            good, bad = (_answer_ids(codec, answer) for answer in preferred_pair(source, task))
        except ValueError as problem:
            raise ConfigError([f"env: {problem}"]) from problem
        pair = Preference(tuple(codec.encode_prompt(task.prompt)), (*good, end), (*bad, end))
        length = len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
        if length > max_tokens:
            raise ConfigError(
                [
                    f"env: prompt and answer of {task.task_id} have {length} tokens, above model.max_context_tokens="
                    f"{max_tokens}. Leave such rows out, or use a larger context."
                ]
            )
        found.append(pair)
    return found


def _answer_ids(codec: TokenCodec, answer: str) -> tuple[int, ...]:
    return tuple(codec.encode_prompt(answer)) if answer else ()
