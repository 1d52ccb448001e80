"""Checks of lengths in tokens: every prompt and its answer fit the context. Needs the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.trajectory import Task
from penstock.envs.contract import GoldSource, TaskSource
from penstock.envs.preferences import preferred_pair
from penstock.platform.config.findings import Finding, error
from penstock.platform.config.schema import RunConfig

Encode = Callable[[str | list[dict[str, str]]], Sequence[int]]


def check_prompts(config: RunConfig, tasks: Sequence[Task]) -> Iterator[Finding]:
    """The longest prompt and a full answer fit."""
    answer, context = config.rollout.sampling.max_new_tokens, config.model.max_context_tokens
    if answer >= context:
        return  # no room for any prompt has its own finding
    longest = yield from _longest(config, tasks, lambda encode, task: len(encode(task.prompt)))
    if longest is None:
        return
    task, length = longest
    if length + answer > context:
        yield error(
            f"env: the prompt of {task.task_id} has {length} tokens; with rollout.sampling.max_new_tokens={answer} "
            f"that is {length + answer}, above model.max_context_tokens={context}: the context would cut its answer. "
            f"Use a context of at least {length + answer}, or a smaller max_new_tokens.",
            "env",
            "model",
            "rollout.sampling.max_new_tokens",
        )


def check_examples(config: RunConfig, source: GoldSource, tasks: Sequence[Task]) -> Iterator[Finding]:
    """The longest worked example, end token included, fits; a new policy has an embedding for every token."""
    from penstock.rollout.tokenizers import NEW_TOKENIZERS

    shape, context = config.model.shape, config.model.max_context_tokens
    num_tokens = len(NEW_TOKENIZERS[config.model.tokenizer]())
    if config.model.from_scratch and shape.vocab_size < num_tokens:
        yield error(
            f"model.shape.vocab_size={shape.vocab_size} is below the {num_tokens} tokens of "
            f"model.tokenizer={config.model.tokenizer}, which model.from_scratch=true uses: some would have no "
            f"embedding. Use at least {num_tokens}.",
            "model.shape.vocab_size",
            "model.from_scratch",
        )
        return
    longest = yield from _longest(
        config, tasks, lambda encode, task: len(encode(task.prompt)) + len(encode(source.gold_response(task))) + 1
    )
    if longest is None:
        return
    task, length = longest
    if length > context:
        yield error(
            f"env: the worked example of {task.task_id} has {length} tokens, above model.max_context_tokens={context}: "
            f"the policy would be trained on positions it can never use. Use a context of at least {length}.",
            "env",
            "model",
        )


def check_pairs(config: RunConfig, source: TaskSource, tasks: Sequence[Task]) -> Iterator[Finding]:
    """There is a pair for every task, and the longest answer fits, end token included."""
    try:
        answers = {id(task): preferred_pair(source, task) for task in tasks}
    except ValueError as problem:
        yield error(
            f"env.factory={config.env.factory}: {problem}. Learning from preferences takes columns `chosen` and "
            "`rejected` (docs/guides/datasets.md), or a task source with gold_response (envs/contract.py, GoldSource).",
            "env",
        )
        return

    def length(encode: Encode, task: Task) -> int:
        return len(encode(task.prompt)) + max(len(encode(answer)) if answer else 0 for answer in answers[id(task)]) + 1

    longest = yield from _longest(config, tasks, length)
    if longest is not None and longest[1] > config.model.max_context_tokens:
        yield error(
            f"env: prompt and answer of {longest[0].task_id} have {longest[1]} tokens, above model.max_context_tokens="
            f"{config.model.max_context_tokens}. Leave such rows out, or use a context of at least {longest[1]}.",
            "env",
            "model",
        )


def _longest(
    config: RunConfig, tasks: Sequence[Task], measure: Callable[[Encode, Task], int]
) -> Generator[Finding, None, tuple[Task, int] | None]:
    """The longest of `tasks` and its length; None, if it cannot be told."""
    from penstock.rollout.tokenizers import NEW_TOKENIZERS, TokenCodec, load_codec

    path = f"model.tokenizer={config.model.tokenizer}" if config.model.from_scratch else config.model.path
    if path is None or not (config.model.from_scratch or (Path(path).expanduser() / "config.json").exists()):
        return None  # an absent policy has its own finding
    try:
        marks = config.env.reasoning
        is_new = config.model.from_scratch
        codec = TokenCodec(NEW_TOKENIZERS[config.model.tokenizer](), (), marks) if is_new else load_codec(path, marks)
        lengths = [measure(codec.encode_prompt, task) for task in tasks]
    except ConfigError as problem:
        yield from (error(violation, "env", "model") for violation in problem.violations)
        return None
    except TrajectoryError as problem:
        yield error(f"env: a task cannot be tokenised by {path}: {problem.detail}.", "env", "model")
        return None
    except Exception as problem:  # noqa: BLE001 - user code runs here, whatever it raises is a finding
        raised = f"{type(problem).__name__}: {problem}"
        yield error(f"env.factory={config.env.factory}: tokenising its tasks raised {raised}", "env")
        return None
    index = max(range(len(tasks)), key=lengths.__getitem__)
    return tasks[index], lengths[index]
