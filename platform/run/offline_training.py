"""Offline training without engines: `penstock sft`, `penstock rm` and `penstock dpo`.

All three use the trainer of RL. `sft` learns from the gold responses of the task source, `rm` and `dpo` from preference
pairs of a chosen and a rejected answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import ConfigError, PenstockError, TrainingError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import OnLongPrompt
from penstock.envs.contract import GoldSource, TaskSource
from penstock.envs.loading import load_task_source
from penstock.envs.streams import held_out_tasks
from penstock.envs.tasks.preferences import preferred_pair
from penstock.platform.checks.run_dir import is_finished
from penstock.platform.cluster.actor_factory import model_path, reserve_run_devices, start_trainer_group
from penstock.platform.cluster.session import absolute_path, cluster_session
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.console import RunConsole
from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.progress import Progress, format_duration
from penstock.platform.metrics.trackers.build import build_trackers
from penstock.platform.run.evaluation import evaluated_on
from penstock.platform.run.lifecycle import EXIT_OK, Stop, run_to_end, write_failure
from penstock.platform.run.run_dir import in_new_run_dir, mark_finished
from penstock.rollout.tokenization.tokenizers import NEW_TOKENIZERS, TokenCodec, load_codec
from penstock.trainer.algorithms.corrections import CorrectionConfig
from penstock.trainer.algorithms.losses.pairs import DpoConfig
from penstock.trainer.batches.examples import Example, ModelKind, Preference
from penstock.trainer.config import AlgorithmConfig, PreferenceConfig, SftConfig

STARTING = Progress("starting Ray and the trainer")
_Item = TypeVar("_Item")


@asynccontextmanager
async def offline_training(
    config: RunConfig, run_dir: Path, path: str, command: Command, console: RunConsole, progress: Callable[[], Progress]
) -> AsyncIterator[tuple[TrainerClient, MetricsHub]]:
    """Start trackers, Ray and trainer ranks for the model at `path`; marks the run finished if no error occurs.

    Meanwhile the console shows `progress`.
    """
    hub = MetricsHub(build_trackers(config.tracker, run_dir, config.name, config.model_dump(mode="json")))
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(console.showing(progress))
            at_nodes = await stack.enter_async_context(cluster_session(config, command))
            kind: ModelKind = "reward" if command == "rm" else "policy"
            devices = await reserve_run_devices(at_nodes, command)
            trainer = await start_trainer_group(at_nodes, absolute_path(path), kind, command, devices=devices)
            stack.push_async_callback(trainer.close)
            yield trainer, hub
    except BaseException as error:
        write_failure(run_dir, error)
        raise
    finally:
        hub.close(None)
    mark_finished(config)


@asynccontextmanager
async def saved_if_ended(
    trainer: TrainerClient, folder: str, is_wanted: Callable[[], bool] = lambda: True
) -> AsyncIterator[None]:
    """Within it, the model is saved if the training fails or is told to end; a step that runs is not waited for."""
    try:
        yield
    except BaseException:
        # The error that ended it is reported, not a follow-up error of saving from a dead rank.
        with suppress(PenstockError):
            if is_wanted():
                if not await trainer.stop_step():
                    await trainer.wait_for_step()
                await trainer.save(folder)
        raise


def run_sft(config: RunConfig) -> int:
    """Run `penstock sft` to its end; returns the exit code."""
    sft = config.sft
    assert sft is not None, "the configuration checks require it, and a task source with gold responses"
    if sft.reuse and is_finished(config):
        print(f"{config.run_dir}/policy exists and has the same configuration: it is reused (sft.reuse=true).")
        return EXIT_OK
    train = partial(_train_sft, config, sft)
    return run_to_end(lambda: in_new_run_dir(config, train), Stop(config.stop_grace_s))


async def _train_sft(config: RunConfig, sft: SftConfig, run_dir: Path) -> int:
    """Train until the target accuracy or `sft.max_steps` is reached, and write the policy."""
    source = cast("GoldSource", load_task_source(config.env, config.seed))
    console = RunConsole(sft.max_steps, config.console)
    path = initial_policy(config, run_dir)
    console.header(
        config.name,
        {
            "policy": f"{path} ({config.model.shape.num_parameters / 1e6:.1f} M parameters)",
            "batch": f"{sft.batch_size} worked examples",
            "stop": "never early"
            if sft.stop_at_accuracy is None
            else f"when one sample gives {sft.stop_at_accuracy:g} of the gold answers that it is measured on",
            "accuracy": "share of gold answers given token by token (teacher forcing); a reward may accept others, too",
            "run": str(run_dir),
        },
    )
    step = 0

    def progress() -> Progress:
        return Progress("training", step - 1, sft.max_steps, "steps") if step else STARTING

    async with offline_training(config, run_dir, path, "sft", console, progress) as (trainer, hub):
        codec, policy = load_codec(path, config.env), str(run_dir / "policy")
        limit = ExampleLimit(config.model.max_context_tokens, config.env.on_long_prompt)
        measured = held_out_tasks(source, sft.eval_tasks)
        measured_on = evaluated_on(measured)
        held_out = list(encode_examples(source, codec, measured, limit))
        examples = encode_examples(source, codec, source.train(), limit)
        rule, bad_steps = StopRule(sft), BadSteps("sft", config.trainer.max_bad_steps)
        started = time.monotonic()
        is_kept = False
        async with saved_if_ended(trainer, policy, lambda: not is_kept):
            for step in range(1, sft.max_steps + 1):
                metrics = await trainer.supervised_step(list(islice(examples, sft.batch_size)))
                bad_steps.count(step, metrics)
                if not held_out or (step % sft.eval_every_steps and step != sft.max_steps):
                    hub.log(step, metrics)
                    continue
                greedy, sampled = await trainer.teacher_forced(held_out)
                hub.log(step, metrics | {"sft/accuracy": greedy, "sft/sampled_accuracy": sampled})
                elapsed = format_duration(time.monotonic() - started)
                scores = f"{measured_on} gold answers {sampled:.3f} sampled, {greedy:.3f} greedy"
                console.note(f"step {step:4d}  loss {metrics['sft/loss']:.4f}  {scores}  {elapsed}")
                if rule.is_best(step, sampled, greedy):
                    await trainer.save(policy)
                    is_kept = True
                if rule.is_over(sampled):
                    break
            if not is_kept:
                await trainer.save(policy)
        if rule.best_step is None:
            why = "none was within sft.max_greedy_accuracy" if held_out else "nothing is held out to measure on"
            kept = f"the last step: {why}"
        else:
            kept = f"step {rule.best_step}: gold answers {rule.best_sampled:.3f} sampled, {rule.best_greedy:.3f} greedy"
        console.note(f"policy written to {policy} ({kept})")
        limit.tell_skipped(console)
    return EXIT_OK


@dataclass(slots=True)
class StopRule:
    """Decides which step of the warm start is kept and when training stops.

    Accuracy fluctuates between steps, so no single step may meet both the target and the ceiling
    `sft.max_greedy_accuracy`. The step with the best sampled accuracy under the ceiling is kept. Training stops when
    that step has reached the target, or when any step has reached twice the target.
    """

    sft: SftConfig
    best_step: int | None = None
    best_sampled: float = -1.0
    best_greedy: float = 0.0

    def is_best(self, step: int, sampled: float, greedy: float) -> bool:
        """Record a measurement. Returns whether its policy is the best so far and should be saved."""
        if greedy > self.sft.max_greedy_accuracy or sampled <= self.best_sampled:
            return False
        self.best_step, self.best_sampled, self.best_greedy = step, sampled, greedy
        return True

    def is_over(self, sampled: float) -> bool:
        """Whether the kept policy has reached the target, or training has clearly passed it."""
        target = self.sft.stop_at_accuracy
        return target is not None and (self.best_sampled >= target or sampled >= 2 * target)


@dataclass(slots=True)
class BadSteps:
    """Ends a training whose steps are skipped because their numbers are not finite."""

    command: Command
    limit: int
    """`trainer.max_bad_steps`."""
    num_in_a_row: int = 0

    def count(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step, if it was skipped.

        Raises:
            TrainingError: After `limit` of them in a row.
        """
        self.num_in_a_row = self.num_in_a_row + 1 if metrics["trainer/skipped_updates"] else 0
        if self.num_in_a_row >= self.limit:
            raise TrainingError(
                f"{self.command}: {self.num_in_a_row} steps in a row up to step {step} had a non-finite loss or "
                f"gradient, trainer.max_bad_steps is {self.limit}: they were skipped, so nothing is learned. Lower "
                "trainer.optimizer.lr, or check the model."
            )


class ExampleLimit:
    """Leaves out examples that exceed the context, or refuses them (`env.on_long_prompt`)."""

    def __init__(self, max_tokens: int, on_long_prompt: OnLongPrompt) -> None:
        self._max_tokens = max_tokens
        self._is_skipping = on_long_prompt == "skip"
        # By id: each epoch leaves them out again.
        self._skipped: set[TaskId] = set()

    def fits(self, task: Task, num_tokens: int) -> bool:
        """Whether an example of so many tokens, prompt and answer, is trained on.

        Raises:
            ConfigError: If it does not fit and is not skipped.
        """
        if num_tokens <= self._max_tokens:
            return True
        if not self._is_skipping:
            raise ConfigError(
                [
                    f"env: prompt and answer of {task.task_id} have {num_tokens} tokens, above "
                    f"model.max_context_tokens={self._max_tokens}. Raise the context length, or set "
                    "env.on_long_prompt=skip."
                ]
            )
        self._skipped.add(task.task_id)
        return False

    def tell_skipped(self, console: RunConsole) -> None:
        """Print how many were left out."""
        if self._skipped:
            console.note(
                f"examples skipped, because they have more than {self._max_tokens} tokens: {len(self._skipped)}"
            )


def encode_examples(
    source: GoldSource, codec: TokenCodec, tasks: Iterable[Task], limit: ExampleLimit
) -> Iterator[Example]:
    """Encode the gold responses that fit as token ids, each with the end token.

    Raises:
        ConfigError: If one exceeds the limit and is not skipped.
    """
    for task in tasks:
        prompt = codec.encode_prompt(task.prompt)
        response = (*codec.encode_prompt(source.gold_response(task)), codec.end_after(task.prompt))
        if limit.fits(task, len(prompt) + len(response)):
            yield prompt, response


def initial_policy(config: RunConfig, run_dir: Path) -> str:
    """Path of the initial policy: `model.path`, or a new random policy of `model.shape` in the run directory."""
    if not config.model.from_scratch:
        return model_path(config)
    from penstock.trainer.models.tiny_policy import create_policy

    path = str(run_dir / "initial")
    create_policy(config.model, NEW_TOKENIZERS[config.model.tokenizer](), path, config.seed)
    return path


def run_rm(config: RunConfig) -> int:
    """Run `penstock rm` to its end; returns the exit code."""
    return _run_preferences(config, "rm")


def run_dpo(config: RunConfig) -> int:
    """Run `penstock dpo` to its end; returns the exit code."""
    return _run_preferences(config, "dpo")


def _run_preferences(config: RunConfig, command: Command) -> int:
    preference = config.preference
    assert preference is not None, "the configuration checks require it"
    is_policy, smoothing = command == "dpo", preference.label_smoothing
    pairs = AlgorithmConfig(
        loss=DpoConfig(beta=preference.beta if is_policy else 1.0, length=preference.length, label_smoothing=smoothing),
        nll_coefficient=preference.nll_coefficient if is_policy else 0.0,
        correction=CorrectionConfig(),
    )
    paired = config.model_copy(update={"algorithm": pairs})
    train = partial(_train_preferences, paired, preference, command)
    return run_to_end(lambda: in_new_run_dir(paired, train), Stop(paired.stop_grace_s))


async def _train_preferences(config: RunConfig, preference: PreferenceConfig, command: Command, run_dir: Path) -> int:
    """Train on all pairs and write the model. The reference of DPO is the policy before the first step."""
    console, path, size = RunConsole(preference.num_steps, config.console), model_path(config), preference.batch_size
    is_policy = command == "dpo"
    facts = {
        "model": f"{'policy' if is_policy else 'reward model'} from {path}",
        "batch": f"{size} pairs",
        "run": str(run_dir),
    }
    console.header(config.name, facts)
    pairs: list[Preference] = []
    is_started, step, num_pairs = False, 0, size * preference.num_steps

    def progress() -> Progress:
        if step:
            return Progress("training", step - 1, preference.num_steps, "steps")
        return Progress("encoding", len(pairs), num_pairs, "pairs") if is_started else STARTING

    async with offline_training(config, run_dir, path, command, console, progress) as (trainer, hub):
        is_started = True
        source, codec = load_task_source(config.env, config.seed), load_codec(path, config.env)
        limit = ExampleLimit(config.model.max_context_tokens, config.env.on_long_prompt)
        measured = held_out_tasks(source, preference.eval_pairs)
        await collect(islice(encode_pairs(source, codec, source.train(), limit), num_pairs), pairs)
        held_out: list[Preference] = []
        await collect(encode_pairs(source, codec, measured, limit), held_out)
        limit.tell_skipped(console)
        folder = str(run_dir / ("policy" if is_policy else "reward_model"))
        bad_steps = BadSteps(command, config.trainer.max_bad_steps)
        async with saved_if_ended(trainer, folder):
            started = time.monotonic()
            references = await trainer.preference_logprobs(pairs) if is_policy else None
            start = await trainer.preference_margins(held_out) if is_policy and held_out else np.zeros(len(held_out))
            for step in range(1, preference.num_steps + 1):
                first, last = (step - 1) * size, step * size
                of_batch = None if references is None else references[2 * first : 2 * last]
                metrics = await trainer.preference_step(pairs[first:last], of_batch)
                bad_steps.count(step, metrics)
                if held_out and (step % preference.eval_every_steps == 0 or step == preference.num_steps):
                    accuracy = float(np.mean(await trainer.preference_margins(held_out) > start))
                    metrics = metrics | {"preference/accuracy": accuracy}
                    elapsed = format_duration(time.monotonic() - started)
                    loss, kind = f"loss {metrics['preference/loss']:.4f}", evaluated_on(measured)
                    console.note(f"step {step:4d}  {loss}  {kind} pairs ranked right {accuracy:.3f}  {elapsed}")
                hub.log(step, metrics)
            await trainer.save(folder)
    return EXIT_OK


async def collect(items: Iterator[_Item], found: list[_Item]) -> None:
    """Append the items in a thread, since the event loop answers signals. The thread ends if this is cancelled."""
    is_over = threading.Event()

    def append() -> None:
        for one in items:
            if is_over.is_set():
                return
            found.append(one)

    try:
        await asyncio.to_thread(append)
    finally:
        is_over.set()


def encode_pairs(
    source: TaskSource, codec: TokenCodec, tasks: Iterable[Task], limit: ExampleLimit
) -> Iterator[Preference]:
    """Encode the preference pairs that fit as token ids; each answer includes the end token.

    Raises:
        ConfigError: If a task has no pair, or prompt and answer exceed the limit and are not skipped.
    """
    for task in tasks:
        end = codec.end_after(task.prompt)
        try:
            chosen, rejected = (
                codec.encode_prompt(answer) if answer else () for answer in preferred_pair(source, task)
            )
        except ValueError as problem:
            raise ConfigError([f"env: {problem}"]) from problem
        pair = Preference(tuple(codec.encode_prompt(task.prompt)), (*chosen, end), (*rejected, end))
        if limit.fits(task, len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))):
            yield pair
