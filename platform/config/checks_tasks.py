"""Checks of what the user plugs in: import paths resolve, held-out tasks are unseen, prompts fit the context.

Only some thousand tasks are read: enough to catch a wrong split, cheap enough to do before every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from penstock.dataflow.errors import ConfigError, PenstockError, TrajectoryError
from penstock.dataflow.trajectory import Task
from penstock.envs.contract import TaskSource
from penstock.envs.loading import load_reward, load_task_source
from penstock.platform.config.findings import Command, Finding
from penstock.platform.config.schema import RunConfig

NUM_TRAIN_TASKS = 4096
"""Training tasks that are compared with the held-out ones."""
NUM_MEASURED_PROMPTS = 1024
"""Prompts per split that are tokenised."""

_ENV_KEYS = ("env", "evaluation")


def check_plugins(config: RunConfig, command: Command) -> list[Finding]:
    """Load the task source and the reward, and look at the first tasks."""
    findings = [] if command == "sft" else _load_findings(lambda: load_reward(config.reward), ("reward",))
    try:
        source = load_task_source(config.env, config.seed)
    except ConfigError as error:
        return findings + [Finding(violation, ("env",)) for violation in error.violations]
    except Exception as error:  # noqa: BLE001 - user code runs here, whatever it raises is a finding
        raised = f"env.factory={config.env.factory} raised {type(error).__name__}: {error}"
        return [*findings, Finding(raised, ("env",))]
    if command == "sft" and not hasattr(source, "gold_response"):
        findings.append(
            Finding(
                f"env.factory={config.env.factory} has no gold_response(task): there is nothing to learn from in "
                "`penstock sft`. Add it (envs/contract.py, GoldSource).",
                ("env",),
            )
        )
    return findings + _task_findings(config, source, command)


def overlap(train: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """Training tasks whose prompt is also held out."""
    unseen = {_prompt_key(task) for task in held_out}
    return [task for task in train if _prompt_key(task) in unseen]


def _task_findings(config: RunConfig, source: TaskSource, command: Command) -> list[Finding]:
    try:
        held_out = source.held_out(_num_held_out(config, command))
        train = list(islice(source.train(), NUM_TRAIN_TASKS))
    except ConfigError as error:  # a dataset that cannot be had, says envs/math_tasks.py
        return [Finding(violation, ("env",), "absent") for violation in error.violations]
    except ValueError as error:
        return [Finding(f"evaluation.num_tasks={_num_held_out(config, command)}: {error}", _ENV_KEYS)]
    except Exception as error:  # noqa: BLE001 - user code runs here, whatever it raises is a finding
        raised = f"env.factory={config.env.factory}: its tasks cannot be read, {type(error).__name__}: {error}"
        return [Finding(raised, ("env",), "absent" if isinstance(error, OSError) else "error")]
    findings = []
    if seen := overlap(train, held_out):
        findings.append(
            Finding(
                f"env: {len(seen)} of the first {len(train)} training tasks are also among the {len(held_out)} held-out ones, "
                f"e.g. {_show(seen[0])}: accuracy would measure memory. Split by a hash of the prompt.",
                _ENV_KEYS,
            )
        )
    if command == "sft":
        return findings
    return findings + _length_findings(config, [*train[:NUM_MEASURED_PROMPTS], *held_out[:NUM_MEASURED_PROMPTS]])


def _num_held_out(config: RunConfig, command: Command) -> int:
    return config.sft.eval_tasks if command == "sft" and config.sft else config.evaluation.num_tasks


def _length_findings(config: RunConfig, tasks: list[Task]) -> list[Finding]:
    """The longest prompt and a full answer fit the context. Needs the policy's tokenizer on this machine."""
    path, answer, context = config.model.path, config.rollout.sampling.max_new_tokens, config.model.max_context_tokens
    if path is None or not Path(path).expanduser().is_dir() or answer >= context:
        return []  # an absent policy, or no room for any prompt, has its own finding
    from penstock.rollout.tokenizers import load_codec

    keys = ("env", "model", "rollout.sampling.max_new_tokens")
    try:
        codec = load_codec(path)
        longest = max(tasks, key=lambda task: len(codec.encode_prompt(task.prompt)))
        length = len(codec.encode_prompt(longest.prompt))
    except (PenstockError, TrajectoryError) as error:
        return [Finding(f"env: a prompt cannot be tokenised by {path}: {error}", keys)]
    if length + answer <= context:
        return []
    return [
        Finding(
            f"env: the prompt of {longest.task_id} has {length} tokens; with rollout.sampling.max_new_tokens={answer} that is "
            f"{length + answer}, above model.max_context_tokens={context}: its answer could be cut short by the context. "
            f"Use a context of at least {length + answer}, or max_new_tokens <= {max(context - length, 0)}.",
            keys,
        )
    ]


def _load_findings(load: Callable[[], object], keys: tuple[str, ...]) -> list[Finding]:
    try:
        load()
    except ConfigError as error:
        return [Finding(violation, keys) for violation in error.violations]
    return []


def _prompt_key(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt, sort_keys=True)


def _show(task: Task, limit: int = 60) -> str:
    text = repr(task.prompt)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


