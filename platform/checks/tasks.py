"""Checks of the user's plugins: import paths resolve, the reward accepts the tasks, held-out tasks are not trained on,
and every prompt and its answer fit the context.

Only the first few thousand tasks are read, which detects a wrong split and is fast enough to do before every run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import MAX_SKIPPED_SHARE
from penstock.envs.config import EnvConfig
from penstock.envs.contract import GoldSource, RewardContext, RewardFunction, TaskSource
from penstock.envs.fingerprint import changes, fingerprints
from penstock.envs.import_path import call_problem
from penstock.envs.loading import load_reward, load_task_source
from penstock.envs.rewards.composition import calls_of
from penstock.envs.row_files import NotDownloadedError
from penstock.envs.scripted_check import scripted_turns
from penstock.envs.streams import (
    MAIN,
    MAX_HELD_OUT_TASKS,
    held_out_tasks,
    load_task_streams,
    named_tasks,
    place_of,
)
from penstock.envs.tasks.preferences import preferred_pair
from penstock.platform.checks.first_calls import check_first_calls
from penstock.platform.checks.model_files import num_positions
from penstock.platform.checks.run_dir import is_run_dir, read_data
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, Fit, absent, error, note, warning
from penstock.platform.config.schema import RunConfig
from penstock.weights.hf_folder import CONFIG_FILE, local_path, model_folder

if TYPE_CHECKING:
    from penstock.rollout.tokenization.tokenizers import TokenCodec

Encode = Callable[[str | list[dict[str, str]]], Sequence[int]]

NUM_TRAIN_TASKS = 4096
"""Training tasks that are compared with the held-out ones."""
NUM_MEASURED_TASKS = 1024
"""Tasks per split that are tokenised."""
NUM_SCRIPTED_TASKS = 128
"""Training tasks whose scripted answers are tokenised."""
MOST_PROMPTS = 0.9
"""Share of the prompts for which a default context is made long enough; the longest may be far from all others."""
MAX_CUT_SHARE = 0.1
"""As the healthy range of `length/truncated_share`."""
_newest_codec: list[tuple[Any, TokenCodec]] = []
"""The tokenizer that was read last, and what it was read from; empty at first."""


class TaskSample(NamedTuple):
    """The first tasks of both splits."""

    train: list[Task]
    held_out: list[Task]


def check_plugins(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Load the task source and the reward, and check the first tasks."""
    reward: RewardFunction | None = None
    if command not in WITHOUT_ENGINES:
        try:
            reward = load_reward(config.reward, RewardContext(config.sandbox))
        except ConfigError as problem:
            yield from (error(violation, "reward") for violation in problem.violations)
    try:
        source = load_task_source(config.env, config.seed)
    except ConfigError as problem:
        yield from (error(violation, "env") for violation in problem.violations)
        return
    except Exception as problem:  # noqa: BLE001 - user code may raise anything, which is a finding
        yield error(f"env.factory={config.env.factory} raised {type(problem).__name__}: {problem}", "env")
        return
    tasks = yield from _read_tasks(config, source, command)
    if tasks is None:
        return
    yield from check_sample(config.env, tasks)
    yield from _check_data(config)
    if reward is not None:
        misfits = list(check_reward(reward, tasks, getattr(source, "left_out", None), is_set=config.is_typed("reward")))
        yield from misfits or check_first_calls(config, source, reward, tasks.train, tasks.held_out)
    if command in ("train", "eval") and config.evaluation.sets:
        yield note(f"evaluation: {planned(config, MAIN, len(tasks.held_out), command)}", "evaluation")
        for name in config.evaluation.sets:
            yield from check_set(config, name, command, tasks, reward)
    measured = TaskSample(tasks.train[:NUM_MEASURED_TASKS], tasks.held_out[:NUM_MEASURED_TASKS])
    yield from check_spelled_tokens(config, [*measured.train, *measured.held_out])
    if command not in WITHOUT_ENGINES:
        without_room = list(check_room(config, measured))
        yield from without_room or check_prompts(config, source, measured)
        yield from check_stop(config)
        yield from check_scripted_turns(config, source, tasks.train[:NUM_SCRIPTED_TASKS])
    elif command in ("rm", "dpo"):
        yield from check_pairs(config, source, measured)
    elif hasattr(source, "gold_response"):
        yield from check_examples(config, cast("GoldSource", source), measured)
    else:
        yield error(
            f"env.factory={config.env.factory} has no gold_response(task), from which `penstock {command}` learns. "
            "Add it (envs/contract.py, GoldSource).",
            "env",
        )


def _read_tasks(config: RunConfig, source: TaskSource, command: Command) -> Generator[Finding, None, TaskSample | None]:
    """Read the first tasks. Yields findings, and returns None if the tasks cannot be read."""
    key, num_held_out = "evaluation.num_tasks", config.evaluation.num_tasks
    if command == "sample":
        is_held_out = config.sample.split == "held_out"
        key, num_held_out = "sample.num_tasks", config.sample.num_tasks if is_held_out else 0
    if command == "sft" and config.sft is not None:
        key, num_held_out = "sft.eval_tasks", config.sft.eval_tasks
    if command in ("rm", "dpo") and config.preference is not None:
        key, num_held_out = "preference.eval_pairs", config.preference.eval_pairs
    asked = MAX_HELD_OUT_TASKS if num_held_out is None else num_held_out
    try:
        held_out = list(named_tasks(source, MAIN, source.held_out(asked))) if asked else []
        # The other commands train only on the factory's own tasks.
        streams = [named_tasks(source, MAIN, source.train())]
        if command == "train" and config.env.streams:
            streams = [stream.tasks for stream in load_task_streams(config.env, config.seed)]
        train = [task for stream in streams for task in islice(stream, NUM_TRAIN_TASKS // len(streams))]
        tasks = TaskSample(train, held_out)
    except NotDownloadedError as problem:
        yield from (absent(violation, "env") for violation in problem.violations)
        return None
    except ConfigError as problem:
        yield from (error(violation, "env") for violation in problem.violations)
        return None
    except ValueError as problem:
        raised = f"held_out({asked}) raised ValueError: {problem}"
        yield error(
            f"env.factory={config.env.factory}: {raised}. If there are fewer tasks, return all of them, or set {key}.",
            "env",
            fits=[Fit(key, asked // 2, raised)],
        )
        return None
    except Exception as problem:  # noqa: BLE001 - user code may raise anything, which is a finding
        report = absent if _is_of_network(problem) else error
        raised = f"{type(problem).__name__}: {problem}"
        yield report(f"env.factory={config.env.factory}: its tasks cannot be read, {raised}", "env")
        return None
    needed = (("train()", tasks.train), *((("held_out()", tasks.held_out),) if tasks.held_out else ()))
    for method, found in needed:
        strange = next((task for task in found if not isinstance(task, Task)), None)
        if strange is not None or not found:
            gave = "no task" if not found else f"a {type(strange).__name__} where a Task was expected"
            yield error(
                f"env.factory={config.env.factory}: {method} gave {gave}. Return penstock.dataflow.trajectory."
                "Task objects (envs/contract.py, TaskSource).",
                "env",
                key,
            )
            return None
    few = list(_too_few(config, command, key, num_held_out, len(tasks.held_out)))
    yield from few
    return None if few else tasks


def _too_few(config: RunConfig, command: Command, key: str, asked: int | None, found: int) -> Iterator[Finding]:
    """Check that there are as many held-out tasks as are asked for, and some for a command that does nothing else.

    Args:
        config: The configuration.
        command: The command that uses it.
        key: The key of their number.
        asked: Its value.
        found: Number of held-out tasks, up to `asked`.
    """
    on_rows = "env.args.held_out=train evaluates on the training rows of a dataset"
    if command == "sample" and asked == 0:  # it answers training tasks
        return
    if not found and command in ("eval", "sample"):
        none = f"{key}=0" if asked == 0 else "env: there are no held-out tasks"
        yield error(
            f"{none}, and `penstock {command}` only answers those. Hold some out; {on_rows}.",
            *("env", "evaluation.num_tasks"),
        )
    elif not found and asked != 0:
        yield error(
            f"{key}={'null' if asked is None else asked}: there are no held-out tasks. Use 0 for a run without "
            f"evaluations, or hold some out; {on_rows}.",
            "env",
            fits=[Fit(key, 0, f"there are no held-out tasks, so nothing is evaluated; {on_rows}")],
        )
    elif asked is not None and found < asked:
        yield error(
            f"{key}={asked}: there are only {found} held-out tasks. Use at most {found}, or hold out more.",
            "env",
            fits=[Fit(key, found, "there are no more held-out tasks")],
        )
    during = config.evaluation.num_tasks_during_training
    if command == "train" and during is not None and found < during and (asked is None or asked >= during):
        yield error(
            f"evaluation.num_tasks_during_training={during}: there are only {found} held-out tasks. Use "
            f"at most {found}, or hold out more."
        )


def check_set(
    config: RunConfig, name: str, command: Command, tasks: TaskSample, reward: RewardFunction | None
) -> Iterator[Finding]:
    """Check the tasks of a set of `evaluation.sets`, and say how many there are and when they are answered.

    Args:
        config: The configuration.
        name: The set.
        command: The command that uses it.
        tasks: Those of `env`.
        reward: Scores the answers; None if it does not load.
    """
    key, asked, env = f"evaluation.sets.{name}", config.evaluation.of_set(name).num_tasks, config.set_env(name)
    if name in {task.evaluation_set for task in tasks.held_out}:
        yield error(f"{key}: the held-out tasks of env have a set of this name, too. Use another name.", "env")
    try:
        source = load_task_source(env, config.seed)
        found = list(named_tasks(source, MAIN, source.held_out(MAX_HELD_OUT_TASKS if asked is None else asked)))
        strange = next((one for one in found if not isinstance(one, Task)), None)
    except NotDownloadedError as problem:
        yield from (absent(f"{key}: {violation}", "env") for violation in problem.violations)
        return
    except ConfigError as problem:
        yield from (error(f"{key}: {violation}", "env") for violation in problem.violations)
        return
    except Exception as problem:  # noqa: BLE001 - user code may raise anything, which is a finding
        report = absent if _is_of_network(problem) else error
        yield report(f"{key}: its tasks cannot be read, {type(problem).__name__}: {problem}", "env")
        return
    if strange is not None or not found:
        gave = "no task" if strange is None else f"a {type(strange).__name__} where a Task was expected"
        yield error(f"{key}: held_out() of {env.factory} gave {gave}. Hold some out, or leave the set out.", "env")
        return
    if asked is not None and len(found) < asked:
        yield error(
            f"{key}.num_tasks={asked}: there are only {len(found)} held-out tasks. Use at most {len(found)}, or hold "
            "out more.",
            "env",
            fits=[Fit(f"{key}.num_tasks", len(found), "there are no more held-out tasks")],
        )
    sample = TaskSample([], found)
    for finding in (*_check_ids(env, sample), *_check_overlap(TaskSample(tasks.train, found))):
        yield error(f"{key}: {finding.message}", "env")
    yield note(f"{key}: {planned(config, name, len(found), command)}", "evaluation")
    view = config.model_copy(update={"env": env})
    measured = TaskSample([], found[:NUM_MEASURED_TASKS])
    of_set = list(check_spelled_tokens(view, measured.held_out))
    if reward is not None:
        of_set += check_reward(reward, sample, is_set=config.is_typed("reward"))
    of_set += list(check_room(view, measured)) or list(check_prompts(view, source, measured))
    yield from (replace(finding, message=f"{key}: {finding.message}", fits=()) for finding in of_set)


def planned(config: RunConfig, name: str, num_tasks: int, command: Command) -> str:
    """What an evaluation samples, and when."""
    view = config.evaluation.of_set(name)
    answers = f"{view.answers_per_task} answers" if view.answers_per_task > 1 else "1 answer"
    told = f"{num_tasks} tasks, {answers} each at temperature {view.temperature:g}"
    if command != "train":
        return told
    during, every = min(num_tasks, view.first_tasks(num_tasks)), view.every_steps
    times = ["before training"] if view.before_training else []
    times += [f"every {every} steps" + (f" ({during} of them)" if during < num_tasks else "")] if every else []
    return f"{told}; {', '.join([*times, 'after training'])}"


def _is_of_network(problem: Exception) -> bool:
    """Whether it may be raised only because a dry run uses no network."""
    library = type(problem).__module__.partition(".")[0]
    return isinstance(problem, ConnectionError) or library in ("datasets", "huggingface_hub")


def read_sample(source: TaskSource) -> TaskSample:
    """The first tasks of a source without streams. Errors of its code propagate."""
    train = list(islice(named_tasks(source, MAIN, source.train()), NUM_TRAIN_TASKS))
    return TaskSample(train, held_out_tasks(source, None))


def check_sample(env: EnvConfig, tasks: TaskSample) -> Iterator[Finding]:
    """Check tasks of any source: their ids, and that none is in both splits."""
    yield from _check_ids(env, tasks)
    yield from _check_overlap(tasks)


def _check_ids(env: EnvConfig, tasks: TaskSample) -> Iterator[Finding]:
    """Check that ids are unique within a stream, because failures are reported by id. Streams may share ids."""
    by_id: dict[str, str] = {}
    for task in (*(() if env.streams else tasks.train), *tasks.held_out):
        known = by_id.setdefault(task.task_id, _prompt_key(task))
        if known != _prompt_key(task):
            yield error(
                f"env.factory={env.factory}: two different tasks have the id {task.task_id!r}, "
                f"{known:.60} and {_prompt_key(task):.60}: their failures could not be told apart. Number the tasks, "
                "and include the split in the id.",
                "env",
            )
            return


def _check_overlap(tasks: TaskSample) -> Iterator[Finding]:
    """Check that no training task is also held out, by prompt and, for environments, by fields."""
    unseen = {_prompt_key(task) for task in tasks.held_out if not task.is_trained_on}
    if seen := [task for task in tasks.train if _prompt_key(task) in unseen]:
        yield error(
            f"env: {len(seen)} of the first {len(tasks.train)} training tasks are also among the "
            f"{len(tasks.held_out)} held-out ones, e.g. {seen[0].prompt!r:.60}: accuracy would measure memorization. "
            "Split by a hash of the prompt.",
            "evaluation",
            "sft.eval_tasks",
        )


def _check_data(config: RunConfig) -> Iterator[Finding]:
    """Warn if the initial policy comes from a Penstock run whose data has changed since."""
    path = Path(config.model.path or "")
    if local_path(str(path.parent)) is None:
        return
    # The path is RUN/policy or RUN/checkpoints/step_N/policy.
    runs = [folder for folder in path.parents[:3] if is_run_dir(folder)]
    if config.model.path is None or config.model.from_scratch or not runs:
        return
    if found := changes(read_data(runs[0]), fingerprints(config.env, config.seed)):
        yield warning(
            f"model.path={path}: the data has changed since {runs[0]} was trained on it: {'; '.join(found)}. It is "
            "unknown which tasks the policy was trained on. Restore the data, or start from a policy that was not "
            "trained on it.",
            "env",
        )


def check_reward(
    reward: RewardFunction, tasks: TaskSample, left_out: Callable[[], str] | None = None, *, is_set: bool = True
) -> Iterator[Finding]:
    """Check that each reward can be called with the fields of the tasks.

    Args:
        reward: The reward, or several.
        tasks: The tasks.
        left_out: A sentence about the columns of the rows that are no fields.
        is_set: Whether the user has set its key.
    """
    refused: set[str] = set()
    if taken := [task for task in (*tasks.train, *tasks.held_out) if "trajectory" in task.fields]:
        yield error(
            f"env: {taken[0].task_id} has a field 'trajectory', the name under which every reward gets the answer, so "
            "it could not be called. Rename the column, or give the field another name: "
            "env.args.columns={recorded: trajectory}.",
            "reward",
            "env",
        )
        return
    for task in {frozenset(task.fields): task for task in reversed([*tasks.train, *tasks.held_out])}.values():
        for key, function, arguments in calls_of(reward, task.fields):
            if key not in refused and (problem := _misfit(function, arguments)):
                refused.add(key)
                where = f"{key}.fn=" if is_set else "the reward "
                named = function if hasattr(function, "__qualname__") else type(function)
                yield error(
                    f"{where}{named.__module__}:{named.__qualname__} {problem}, for {task.task_id} with the fields "
                    f"{sorted(task.fields)}, so its trajectories could not be scored. Add the missing fields to the "
                    "tasks, or change the parameters of the reward; **_ accepts fields that it does not use."
                    + (left_out() if left_out is not None else ""),
                    "reward",
                    "env",
                )


def _misfit(function: RewardFunction, arguments: Mapping[str, Any]) -> str:
    """Return why `function` cannot be called with these arguments; empty if it can."""
    call = ", ".join(["trajectory", *(f"{name}=…" for name in arguments)])
    return call_problem(function, f"({call})", None, **arguments)


def _prompt_key(task: Task) -> str:
    """Identity of a task: its prompt and, for environments, its fields, which may be the only difference."""
    if task.environment is None and isinstance(task.prompt, str):
        return task.prompt
    seen = task.prompt if task.environment is None else [task.prompt, dict(task.fields)]
    return json.dumps(seen, sort_keys=True, default=repr)


def check_room(config: RunConfig, tasks: TaskSample) -> Iterator[Finding]:
    """Check that most prompts of both splits fit the context together with an answer of full length.

    A default context is as long as they need, if the model has the positions, and default answers take what is left.
    """
    try:
        if (codec := _load_codec(config)) is None:
            return
        # Each once: the stream of a small set has several epochs of it.
        unique = [{task.task_id: task for task in split}.values() for split in tasks]
        measured = [sorted(len(codec.encode_prompt(task.prompt)) for task in split) for split in unique]
    except Exception:  # noqa: BLE001 - `check_prompts` reports what cannot be tokenised
        return
    for split, lengths in zip(("training", "held-out"), measured, strict=True):
        found = list(_room_for(config, lengths, f"of the first {len(lengths)} {split} tasks")) if lengths else []
        yield from found
        if found:
            return


def _room_for(config: RunConfig, lengths: Sequence[int], which: str) -> Iterator[Finding]:
    """`check_room` for the prompts of one split, by their lengths in ascending order."""
    answer, context, path = config.rollout.sampling.max_new_tokens, config.model.max_context_tokens, config.model.path
    median, usual = lengths[(len(lengths) - 1) // 2], lengths[int(MOST_PROMPTS * (len(lengths) - 1))]
    if median + answer <= context:
        return
    positions = num_positions(config) or usual + answer
    num_long = sum(length + answer > context for length in lengths)
    told = (
        f"{num_long} {which} ({num_long / len(lengths):.1%}) are too long, which is more than half: the prompt of half "
        f"of them has {median} tokens or more"
    )
    if positions <= median:
        yield error(
            f"env: {told}, and the model has {positions} positions for prompt and answer (model.path={path}): they "
            "cannot be answered. Use shorter prompts, or a model with a longer context.",
            *("model", "env"),
        )
        return
    fits = []
    if context < positions:
        fits.append(Fit("model.max_context_tokens", min(usual + answer, positions), told))
    left = (context if config.is_typed("model.max_context_tokens") else max(context, positions)) - median
    if 0 < left < answer:
        fits.append(Fit("rollout.sampling.max_new_tokens", left, f"{told}, and the context has {context}"))
    yield error(
        f"env: {told}; with rollout.sampling.max_new_tokens={answer} that is {median + answer}, above "
        f"model.max_context_tokens={context}. Use a longer context, or a smaller max_new_tokens.",
        *("model", "env"),
        fits=fits,
    )


def check_prompts(config: RunConfig, source: TaskSource, tasks: TaskSample) -> Iterator[Finding]:
    """Check that the prompts of tasks, and an answer of full length to them, fit the context."""
    answer, context = config.rollout.sampling.max_new_tokens, config.model.max_context_tokens
    if answer >= context:  # `check_sampling` reports it
        return
    yield from _too_long(
        config,
        source,
        tasks,
        lambda encode, task: len(encode(task.prompt)) + answer,
        lambda task, length: (
            f"the prompt of {task.task_id} has {length - answer} tokens; with rollout.sampling.max_new_tokens="
            f"{answer} that is {length}, above model.max_context_tokens={context}: its answer would be truncated. "
            f"Use a context of at least {length}, or a smaller max_new_tokens."
        ),
    )


def check_spelled_tokens(config: RunConfig, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Warn if prompts spell special tokens, which stay text: they may have been rendered by a chat template before."""
    try:
        if (codec := _load_codec(config)) is None:
            return
    except ConfigError:
        return  # `check_prompts` reports it
    found = {task.task_id: codec.spelled_token(task.prompt) for task in tasks}
    spelled = {task_id: token for task_id, token in found.items() if token is not None}
    if spelled:
        task_id, token = next(iter(spelled.items()))
        yield warning(
            f"env.special_tokens=text: {len(spelled)} of {len(found)} prompts spell a special token of the tokenizer, "
            f"first {task_id} with {token!r}. It stays text, so that no prompt can end a message or begin one. If the "
            "prompts are rendered already, set env.special_tokens=tokens.",
            "model",
        )


def check_stop(config: RunConfig) -> Iterator[Finding]:
    """Check that the stop texts can appear in an answer's text, and the stop tokens in its tokens; say which token the
    chat template adds to these.
    """
    sampling, vocab_size = config.rollout.sampling, config.model.shape.vocab_size
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            yield error(
                f"rollout.sampling.stop_token_ids has {token_id}; model.shape.vocab_size={vocab_size}, so the policy "
                f"never samples it. Use ids below {vocab_size}."
            )
    try:
        if (codec := _load_codec(config)) is None:
            return
    except ConfigError:
        return  # `check_prompts` reports it
    if codec.turn_end not in (None, *codec.named_ends, *sampling.stop_token_ids):
        yield warning(
            f"rollout.sampling: an answer also ends with {codec.tokenizer.decode([codec.turn_end])!r} (id "
            f"{codec.turn_end}), with which the chat template ends a turn. Tokenizer and generation_config.json name "
            f"{list(codec.named_ends)} only, so such an answer would run on to rollout.sampling.max_new_tokens.",
            "model",
        )
    for text in sampling.stop:
        if special := next((one for one in codec.tokenizer.all_special_tokens if one in text), None):
            yield error(
                f"rollout.sampling.stop has {text!r}: {special!r} is a special token of the tokenizer, which is left "
                "out of texts, so no answer would end with it. Use rollout.sampling.stop_token_ids="
                f"[{codec.tokenizer.convert_tokens_to_ids(special)}].",
                "model",
            )


def check_scripted_turns(config: RunConfig, source: TaskSource, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Warn if the source's own answers, or the actions of its environment, are longer than a turn may be."""
    limit, needed = config.rollout.sampling.max_new_tokens, {}
    try:
        if (codec := _load_codec(config)) is None:
            return
        for task in tasks:
            if turns := scripted_turns(source, task):
                needed[task.task_id] = max(len(codec.encode_prompt(turn)) + 1 for turn in turns)  # with its end token
    except Exception:  # noqa: BLE001 - `check_prompts` reports what cannot be tokenised
        return
    cut = {task_id: length for task_id, length in needed.items() if length > limit}
    if len(cut) > MAX_CUT_SHARE * len(needed):
        longest = max(cut, key=cut.__getitem__)
        yield warning(
            f"rollout.sampling.max_new_tokens={limit} cannot hold the scripted answers of {len(cut)} of {len(needed)} "
            f"tasks: that of {longest} needs {cut[longest]} tokens in a turn. A policy that answers likewise is cut "
            f"off. Use at least {cut[longest]}, or a tokenizer with longer tokens.",
            "env",
            "model",
        )


def check_examples(config: RunConfig, source: GoldSource, tasks: TaskSample) -> Iterator[Finding]:
    """Check that the longest gold example fits, end token included, and that a new policy can embed every token."""
    from penstock.rollout.tokenization.tokenizers import NEW_TOKENIZERS

    shape, context = config.model.shape, config.model.max_context_tokens
    num_tokens = len(NEW_TOKENIZERS[config.model.tokenizer]())
    if config.model.from_scratch and shape.vocab_size < num_tokens:
        yield error(
            f"model.shape.vocab_size={shape.vocab_size} is below the {num_tokens} tokens of "
            f"model.tokenizer={config.model.tokenizer}, which model.from_scratch=true uses: some tokens would have no "
            f"embedding. Use at least {num_tokens}."
        )
        return
    yield from _too_long(
        config,
        source,
        tasks,
        lambda encode, task: len(encode(task.prompt)) + len(encode(source.gold_response(task))) + 1,
        lambda task, length: (
            f"the gold example of {task.task_id} has {length} tokens, above model.max_context_tokens={context}: "
            f"the policy would be trained on positions beyond its context. Use a context of at least {length}."
        ),
    )


def check_pairs(config: RunConfig, source: TaskSource, tasks: TaskSample) -> Iterator[Finding]:
    """Check that every task has a pair, and that the longest answer fits, end token included."""
    context = config.model.max_context_tokens
    try:
        answers = {id(task): preferred_pair(source, task) for task in (*tasks.train, *tasks.held_out)}
    except ValueError as problem:
        yield error(
            f"env.factory={config.env.factory}: {problem}. Preference training needs columns `chosen` and `rejected` "
            "(docs/guides/datasets.md), or a task source with gold_response (envs/contract.py, GoldSource).",
            "env",
        )
        return

    def length(encode: Encode, task: Task) -> int:
        return len(encode(task.prompt)) + max(len(encode(answer)) if answer else 0 for answer in answers[id(task)]) + 1

    yield from _too_long(
        config,
        source,
        tasks,
        length,
        lambda task, length: (
            f"prompt and answer of {task.task_id} have {length} tokens, above model.max_context_tokens={context}. "
            f"Use a context of at least {length}."
        ),
    )


def _too_long(
    config: RunConfig,
    source: TaskSource,
    tasks: TaskSample,
    measure: Callable[[Encode, Task], int],
    sentence: Callable[[Task, int], str],
) -> Iterator[Finding]:
    """Yield what happens to the tasks that exceed the context, by `env.on_long_prompt`, or why they cannot be measured.

    Args:
        config: Configuration of the run.
        source: Of the tasks.
        tasks: The tasks that are measured.
        measure: Tokens that a task needs.
        sentence: What is wrong with a task of so many tokens, and what to do.
    """
    path = f"model.tokenizer={config.model.tokenizer}" if config.model.from_scratch else config.model.path
    limit = config.model.max_context_tokens
    try:
        if (codec := _load_codec(config)) is None:
            return
        # Each once: the stream of a small set has several epochs of it.
        unique = [{task.task_id: task for task in split}.values() for split in tasks]
        measured: list[list[tuple[int, Task]]] = []
        for tasks_of_split in unique:
            measured.append([])
            for task in tasks_of_split:
                measured[-1].append((measure(codec.encode_prompt, task), task))
    except ConfigError as problem:
        yield from (error(violation, "env", "model") for violation in problem.violations)
        return
    except TrajectoryError as problem:
        where = place_of(config.env, source, task)
        yield error(f"env: the task {where} cannot be tokenised by {path}: {problem.detail}.", "model")
        return
    except Exception as problem:  # noqa: BLE001 - user code may raise anything, which is a finding
        raised = f"{type(problem).__name__}: {problem}"
        yield error(f"env.factory={config.env.factory}: tokenising its tasks raised {raised}", "env")
        return
    for split, lengths in zip(("training", "held-out"), measured, strict=True):
        long = [(length, task) for length, task in lengths if length > limit]
        if not long:
            continue
        longest, task = max(long, key=lambda pair: pair[0])
        found = f"{len(long)} of the first {len(lengths)} {split} tasks ({len(long) / len(lengths):.1%})"
        if config.env.on_long_prompt == "error":
            yield error(f"env.on_long_prompt=error: {found} are too long: {sentence(task, longest)}", "env", "model")
            return
        elif len(long) > MAX_SKIPPED_SHARE * len(lengths):
            told = f"env: {found} are too long, which is more than half: {sentence(task, longest)}"
            most = min(longest, num_positions(config) or longest)
            fit = Fit("model.max_context_tokens", most, f"the longest of the {split} tasks has {longest} tokens")
            yield error(told, "env", "model", fits=[fit])
            return
        else:
            yield warning(
                f"env.on_long_prompt=skip: {found} are too long and are left out, {long[0][1].task_id} first. The "
                f"longest: {sentence(task, longest)}",
                "env",
                "model",
            )


def _load_codec(config: RunConfig) -> TokenCodec | None:
    """The tokenizer of the policy; None if there is no policy, which has its own finding.

    Five checks ask for it, and reading a large vocabulary takes a second, so it is kept while its files stay the same.
    """
    from penstock.rollout.tokenization.tokenizers import NEW_TOKENIZERS, load_codec, make_codec

    path = config.model.path
    if config.model.from_scratch:
        return make_codec(NEW_TOKENIZERS[config.model.tokenizer](), config.env)
    folder = None if path is None else model_folder(path)
    if path is None or folder is None or not (folder / CONFIG_FILE).exists():
        return None
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    key = path, config.env, [(name, one.st_mtime_ns, one.st_size) for name, one in stats]
    if not _newest_codec or _newest_codec[0][0] != key:
        _newest_codec[:] = [(key, load_codec(path, config.env))]
    return _newest_codec[0][1]
