"""Environments of the `verifiers` library: `env=verifiers env.args.id=my_environment reward=episode`.

Such an environment calls the policy itself over the OpenAI API, so it is played as an agent program (agents.py): its
own rollout runs unchanged against the recording endpoint, and is then scored by its own functions. Version 0.1 fits
beside our packages (`pip install 'penstock[envs]'`): an environment with a rubric. Version 0.4 does not, and lives in
an interpreter of its own (`make verifiers-env`, `env.python`): a taskset with agents (verifiers_taskset.py).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from functools import cached_property
from types import ModuleType
from typing import Any, Protocol

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.task import Task
from penstock.envs.adapters.verifiers_taskset import BUDGET_CODES, TasksetEnvironment, import_tasksets
from penstock.envs.environment import Done, EndpointAccess
from penstock.envs.import_path import import_extra
from penstock.envs.tasks.agents import AgentProgram, open_client
from penstock.envs.tasks.generated_tasks import endless, is_held_out, row_key, row_task

_RAISED: ContextVar[list[str]] = ContextVar("names of the reward functions that raised")


Row = Mapping[str, Any]


class VerifiersEnvironment(Protocol):
    """An environment of one version of the library; used from one event loop."""

    def rows(self) -> list[Row]:
        """The rows of its dataset: `prompt`, and everything else that a rollout needs, as JSON."""
        ...

    def held_out_rows(self) -> list[Row] | None:
        """The rows of its evaluation dataset; None if it has none."""
        ...

    async def rollout(self, task: Task, access: EndpointAccess) -> Done:
        """Play one row to its end, and score it.

        Raises:
            RuntimeError: If it fails for another reason than what the policy did.
        """
        ...


class VerifiersTasks:
    """Task source over the dataset of one environment.

    Its evaluation dataset is held out, and training skips rows with the same prompts. Without an evaluation dataset, a
    hash of the prompt holds out a tenth of the rows.

    Args:
        seed: Order of the training stream.
        id: Of version 0.1 the id for `verifiers.load_environment`, of 0.4 that of the taskset: the name of a module, in
            which `-` and `_` are equivalent.
        kwargs: Of version 0.1 the arguments of its `load_environment`, of 0.4 the configuration of its environment.

    Raises:
        ConfigError: If verifiers is not installed, or has a version that the adapter does not support.
        ValueError: If the environment does not load, or its rewards or agents do not fit.
    """

    def __init__(self, seed: int, id: str, kwargs: Mapping[str, Any] | None = None) -> None:  # noqa: A002
        self._seed = seed
        self._id = id
        self._played = _load(id, dict(kwargs or {}))
        self._loop = SharedLoop()

    def train(self) -> Iterator[Task]:
        """Endless stream of rows that are not held out: every epoch is a new shuffle, the same for the same seed.

        Raises:
            ConfigError: If there are none.
        """
        unseen = {row_key({"prompt": task.prompt}) for task in self._held_out}
        order = [task for task in self._rows if row_key({"prompt": task.prompt}) not in unseen]
        if not order:
            raise ConfigError(f"env: {self._id} has no training row that is not held out.")
        yield from endless(order, f"{self._id}/train/{self._seed}")

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out rows of a fixed shuffle, each prompt once; all if there are fewer."""
        tasks = list(self._held_out)
        random.Random(f"{self._id}/held-out").shuffle(tasks)
        return tasks[:num_tasks]

    def environment(self) -> VerifiersEpisode:
        """One rollout."""
        return VerifiersEpisode(self._played, self._loop)

    @cached_property
    def _rows(self) -> list[Task]:
        return [row_task(row, f"{self._id}/train/{index}") for index, row in enumerate(self._played.rows())]

    @cached_property
    def _held_out(self) -> list[Task]:
        rows = self._played.held_out_rows()
        if rows is None:
            tasks = [task for task in self._rows if is_held_out({"prompt": task.prompt})]
        else:
            tasks = [row_task(row, f"{self._id}/held_out/{index}") for index, row in enumerate(rows)]
        return list({row_key({"prompt": task.prompt}): task for task in tasks}.values())


class VerifiersEpisode(AgentProgram):
    """One rollout: the weighted sum of its scores is the reward, and each score is a part under its own name."""

    def __init__(self, played: VerifiersEnvironment, loop: SharedLoop) -> None:
        self._played = played
        self._loop = loop

    async def run(self, access: EndpointAccess) -> Done:
        """Play it to its end, and score it."""
        return await self._loop.run(self._played.rollout(self.task, access))


class RubricEnvironment:
    """An environment of version 0.1, whose rubric scores its rollouts.

    Raises:
        ValueError: If it does not load, or its rubric scores a group as a whole.
    """

    def __init__(self, verifiers: ModuleType, name: str, kwargs: Mapping[str, Any]) -> None:
        import datasets

        self._errors = (verifiers.ToolError, verifiers.EmptyModelResponseError)
        datasets.disable_progress_bars()
        # Environments replace the process's handlers of SIGINT and SIGTERM, which belong to the run: restore them.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._played = verifiers.load_environment(name, **kwargs)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._played.set_interleaved_rollouts(False)  # this mode is for prime-rl's servers; our endpoint has the tokens
        for rubric in _rubrics(self._played):
            for function in rubric.funcs:
                if rubric._is_group_func(function):  # noqa: SLF001
                    raise ValueError(
                        f"id={name!r}: its reward function {function.__name__} scores all rollouts of a task together; "
                        "here every trajectory is scored by itself. Take it out of the rubric, or compare in the "
                        "advantage (algorithm.advantage)"
                    )
            rubric.funcs[:] = [_counted(function) for function in rubric.funcs]

    def rows(self) -> list[Row]:
        """As VerifiersEnvironment."""
        return list(self._played.build_dataset() or ())

    def held_out_rows(self) -> list[Row] | None:
        """As VerifiersEnvironment."""
        dataset = self._played.build_eval_dataset()
        return None if dataset is None else list(dataset)

    async def rollout(self, task: Task, access: EndpointAccess) -> Done:
        """As VerifiersEnvironment."""
        row = {"prompt": task.prompt, **task.fields}
        async with open_client(access) as client:
            state = await self._played.rollout(row, client, access.model, deepcopy(self._played.sampling_args))
        error = state["error"]
        # A failed tool call, an empty answer and an exhausted budget are results of the policy; other errors are not.
        is_policy_result = error is None or isinstance(error, self._errors)
        if not is_policy_result and getattr(error.__cause__, "code", None) not in BUDGET_CODES:
            raise RuntimeError(f"the rollout ended with {error!r}: {error.__cause__}") from error
        raised: list[str] = []
        _RAISED.set(raised)
        await self._played.rubric.score_rollout(state)
        return Done({**state["metrics"], "reward": state["reward"]}, {"reward_errors": float(len(raised))})


class SharedLoop:
    """The event loop of all rollouts of a process, in a separate thread that starts with the first rollout.

    Environments and rubrics hold clients, locks and semaphores, which belong to one loop.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Done]) -> Done:
        """Run a coroutine in the shared loop. After a cancellation it waits until the coroutine ends: a hang shows."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()
        here, there = asyncio.get_running_loop(), self._loop
        ended: asyncio.Future[asyncio.Task[Done]] = here.create_future()
        tasks: list[asyncio.Task[Done]] = []

        def begin() -> None:
            tasks.append(there.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(ended.set_result, task))

        there.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: tasks[0].cancel())  # noqa: PLW0108  there is none before `begin`
            await ended
            raise
        return ended.result().result()


def _rubrics(played: Any) -> Iterator[Any]:
    """All rubrics with reward functions, including those in groups of rubrics and of environments."""
    for nested in getattr(played, "envs", ()):
        yield from _rubrics(nested)
    waiting = [played.rubric]
    while waiting:
        rubric = waiting.pop()
        waiting += getattr(rubric, "rubrics", ())
        yield rubric


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which records its exceptions, since verifiers turns them into 0."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(*args, **kwargs)
            return await returned if inspect.isawaitable(returned) else returned
        except Exception:
            _RAISED.get().append(function.__name__)
            raise

    return call


def _load(name: str, kwargs: dict[str, Any]) -> VerifiersEnvironment:
    verifiers = import_extra("verifiers")
    if hasattr(verifiers, "load_environment") and not hasattr(verifiers, "Client"):
        return RubricEnvironment(verifiers, name, kwargs)
    tasksets = import_tasksets()
    if tasksets is None or not hasattr(tasksets, "resolve_env_config"):
        raise ConfigError(
            f"env: verifiers {verifiers.__version__} is installed; this adapter is for 0.1.10, whose dependencies "
            "agree with ours (pip install 'penstock[envs]'), and for 0.4 in an interpreter of its own (`make "
            "verifiers-env`, env.python=.venv-verifiers/bin/python)."
        )
    return TasksetEnvironment(tasksets, name, kwargs)
