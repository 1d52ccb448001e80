"""Checks of what the user plugs in: import paths resolve, held-out tasks are unseen, prompts fit the context.

Only some thousand tasks are read: enough to catch a wrong split, cheap enough to do before every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from penstock.dataflow.errors import ConfigError, PenstockError, TrajectoryError
from penstock.dataflow.trajectory import Task
from penstock.envs.contract import TaskSource
from penstock.envs.loading import load_reward, load_task_source
from penstock.platform.config.findings import Command, Finding, absent, error
from penstock.platform.config.schema import RunConfig

NUM_TRAIN_TASKS = 4096
"""Training tasks that are compared with the held-out ones."""
NUM_MEASURED_PROMPTS = 1024
"""Prompts per split that are tokenised."""

_ENV_KEYS = ("env", "evaluation")


def check_plugins(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Load the task source and the reward, and look at the first tasks."""
    if command != "sft":
        try:
            load_reward(config.reward)
        except ConfigError as problem:
            yield from (error(violation, "reward") for violation in problem.violations)
    try:
        source = load_task_source(config.env, config.seed)
    except ConfigError as problem:
        yield from (error(violation, "env") for violation in problem.violations)
        return
    except Exception as problem:  # noqa: BLE001 - user code runs here, whatever it raises is a finding
        yield error(f"env.factory={config.env.factory} raised {type(problem).__name__}: {problem}", "env")
        return
    if command == "sft" and not hasattr(source, "gold_response"):
        yield error(
            f"env.factory={config.env.factory} has no gold_response(task): there is nothing to learn from in "
            "`penstock sft`. Add it (envs/contract.py, GoldSource).",
            "env",
        )
    yield from _check_tasks(config, source, command)


def overlap(train: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """Training tasks whose prompt is also held out."""
    unseen = {_prompt_key(task) for task in held_out}
    return [task for task in train if _prompt_key(task) in unseen]


def _check_tasks(config: RunConfig, source: TaskSource, command: Command) -> Iterator[Finding]:
    num_held_out = config.sft.eval_tasks if command == "sft" and config.sft else config.evaluation.num_tasks
    try:
        held_out = source.held_out(num_held_out)
        train = list(islice(source.train(), NUM_TRAIN_TASKS))
    except ConfigError as problem:  # a dataset that cannot be had, says envs/math_tasks.py
        yield from (absent(violation, "env") for violation in problem.violations)
        return
    except ValueError as problem:
        yield error(f"evaluation.num_tasks={num_held_out}: {problem}", *_ENV_KEYS)
        return
    except Exception as problem:  # noqa: BLE001 - user code runs here, whatever it raises is a finding
        report = absent if isinstance(problem, OSError) else error
        raised = f"{type(problem).__name__}: {problem}"
        yield report(f"env.factory={config.env.factory}: its tasks cannot be read, {raised}", "env")
        return
    if seen := overlap(train, held_out):
        yield error(
            f"env: {len(seen)} of the first {len(train)} training tasks are also among the {len(held_out)} held-out "
            f"ones, e.g. {_show(seen[0])}: accuracy would measure memory. Split by a hash of the prompt.",
            *_ENV_KEYS,
        )
    if command != "sft":
        yield from _check_lengths(config, [*train[:NUM_MEASURED_PROMPTS], *held_out[:NUM_MEASURED_PROMPTS]])


def _check_lengths(config: RunConfig, tasks: list[Task]) -> Iterator[Finding]:
    """The longest prompt and a full answer fit the context. Needs the policy's tokenizer on this machine."""
    path, answer, context = config.model.path, config.rollout.sampling.max_new_tokens, config.model.max_context_tokens
    if path is None or not (Path(path).expanduser() / "config.json").exists() or answer >= context:
        return  # an absent policy, or no room for any prompt, has its own finding
    from penstock.rollout.tokenizers import load_codec

    keys = ("env", "model", "rollout.sampling.max_new_tokens")
    try:
        codec = load_codec(path)
        lengths = [len(codec.encode_prompt(task.prompt)) for task in tasks]
    except (PenstockError, TrajectoryError) as problem:
        yield error(f"env: a prompt cannot be tokenised by {path}: {problem}", *keys)
        return
    longest = max(range(len(tasks)), key=lengths.__getitem__)
    total = lengths[longest] + answer
    if total > context:
        yield error(
            f"env: the prompt of {tasks[longest].task_id} has {lengths[longest]} tokens; with rollout.sampling."
            f"max_new_tokens={answer} that is {total}, above model.max_context_tokens={context}: the context would "
            f"cut its answer. Use a context of at least {total}, or a smaller max_new_tokens.",
            *keys,
        )


def _prompt_key(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt, sort_keys=True)


def _show(task: Task, limit: int = 60) -> str:
    text = repr(task.prompt)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
