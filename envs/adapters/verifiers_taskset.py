"""Environments of version 0.4 of the `verifiers` library: a taskset, and the agents that play its tasks.

An agent is a program of the library's choice (its *harness*) in a place of the library's choice (its *runtime*). The
library's own server passes the program's requests on to the recording endpoint. The functions of the task then score
the trace.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from penstock.dataflow.task import Task
from penstock.envs.environment import Done, EndpointAccess
from penstock.envs.tasks.agents import without_proxy

BUDGET_CODES = ("max_turns", "context_length_exceeded")
"""Error codes of the endpoint for an exhausted budget: the episode is truncated there and then scored."""
MAX_ROWS = 10_000
"""Rows that are taken of a taskset without an end."""
_DATA = "data"
"""The field with the data of the library's task."""


def import_tasksets() -> ModuleType | None:
    """The module of tasksets of the installed version, ready to run programs in this process; None if it has none."""
    os.environ |= without_proxy()
    if not os.access(os.path.expanduser("~"), os.W_OK):  # noqa: PTH111  isolated code has none, and programs cache there
        os.environ["HOME"] = tempfile.gettempdir()
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name != "verifiers.v1":
            raise
        return None


class TasksetEnvironment:
    """An environment of version 0.4, of which one agent is the policy.

    Args:
        verifiers: The module of tasksets.
        name: Id of the taskset.
        kwargs: Configuration of the environment, as `[env]` of the library's own files.

    Raises:
        ValueError: If it does not load, if several of its agents are the policy, or if it is not said where one runs.
    """

    def __init__(self, verifiers: ModuleType, name: str, kwargs: Mapping[str, Any]) -> None:
        self._verifiers = verifiers
        given = {**kwargs, "taskset": {**kwargs.get("taskset", {}), "id": name}}
        try:
            config = verifiers.resolve_env_config({key: _with_null(value) for key, value in given.items()})
            self._env = verifiers.load_environment(config)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise ValueError(f"id={name!r}: its configuration, kwargs, does not fit: {'; '.join(wrong)}") from error
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(f"id={name!r}: {error}") from error
        agents = {key: value for key, value in config if isinstance(value, verifiers.AgentConfig)}
        policies = [key for key, agent in agents.items() if agent.model is None and agent.client is None]
        if len(policies) != 1:
            raise ValueError(
                f"id={name!r}: {len(policies)} of its {len(agents)} agents are the policy ({', '.join(policies)}); one "
                "has to be. Give the others a model and an endpoint, kwargs.<agent>.model and "
                "kwargs.<agent>.client.base_url"
            )
        for key, agent in agents.items():
            if "runtime" not in agent.model_fields_set:
                raise ValueError(
                    f"id={name!r}: it is not said where the program of its agent {key} runs; the library's default is "
                    f"the service {agent.runtime.type!r}. Set kwargs.{key}.runtime.type: subprocess has the "
                    "permissions of the environment process (env.episode.isolation), docker needs Docker. The program "
                    f"is kwargs.{key}.harness.id: null, a chat with the tools of the task, or bash, the library's "
                    "default, which also gives the policy a shell"
                )
        self._policy = policies[0]
        self._serving: asyncio.Task[None] | None = None
        self._is_up: asyncio.Future[None] | None = None

    def rows(self) -> list[Mapping[str, Any]]:
        """As VerifiersEnvironment. Its prompt is that of the task; the program may put more before it."""
        taskset = self._env.taskset
        return [self._row(task.data) for task in (taskset if taskset.bounded else taskset.take(MAX_ROWS))]

    def held_out_rows(self) -> None:
        """As VerifiersEnvironment: a taskset has one dataset."""
        return

    async def rollout(self, task: Task, access: EndpointAccess) -> Done:
        """As VerifiersEnvironment."""
        await self._serve()
        vf = self._verifiers
        kind = type(self._env.taskset).task_type()
        played = kind(kind.data_type().model_validate(task.fields[_DATA]), self._env.config.taskset.task)
        # The library takes keys from variables only. It hands none whose name contains API_KEY to its programs.
        variable = f"PENSTOCK_API_KEY_{secrets.token_hex(8)}"
        os.environ[variable] = access.api_key
        try:
            client = vf.EvalClientConfig(base_url=access.base_url, api_key_var=variable)
            episode = await self._env.run_episode(played, vf.ModelContext(access.model, client))
        finally:
            del os.environ[variable]
        traces = [trace for trace in episode.traces if trace.agent.name in (self._policy, "")]
        if not episode.ok:
            await self._score_what_a_budget_ended(played, episode, traces)
        if len(traces) != 1:
            raise RuntimeError(
                f"its agent {self._policy} ran {len(traces)} times in one episode; here a trajectory is one run of it"
            )
        scores = {name: reward.score for name, reward in traces[0].rewards.items() if reward is not None}
        metrics = {name: value for name, value in traces[0].metrics.items() if value is not None}
        return Done({**metrics, **scores, "reward": traces[0].reward}, {"num_turns": float(traces[0].num_turns)})

    async def _score_what_a_budget_ended(self, played: Any, episode: Any, traces: list[Any]) -> None:
        """Score a trace whose last request was refused because a budget was exhausted; the library does not.

        Raises:
            RuntimeError: If it failed for another reason, or its scores need the runtime, which has gone.
        """
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "no error"
        if len(traces) != 1 or not errors or not all(_is_of_budget(error) for error in errors):
            raise RuntimeError(f"the rollout ended with {told}")
        await played.score(traces[0])
        unscored = [name for name, reward in traces[0].rewards.items() if reward is None]
        needed = {function.__name__ for function in played.hooks("reward")} - traces[0].rewards.keys()
        if unscored or needed:
            raise RuntimeError(
                f"a budget of env.episode ended the rollout, and {', '.join([*unscored, *sorted(needed)])} cannot be "
                f"scored without its runtime. Limit it before: kwargs.{self._policy}.max_turns"
            )

    async def _serve(self) -> None:
        """Start what all rollouts share, with the first one, in a task that lasts as long as the process."""
        if self._serving is None:
            self._is_up = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._keep_serving(self._is_up))
        assert self._is_up is not None
        await asyncio.shield(self._is_up)

    async def _keep_serving(self, is_up: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                is_up.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001  it fails the rollouts, which wait for it
            is_up.set_exception(error)

    def _row(self, data: Any) -> dict[str, Any]:
        given = [] if data.prompt is None else data.prompt
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else [_plain(one) for one in given]
        if data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        if not messages:  # another agent opens the conversation
            messages.append({"role": "user", "content": data.description or data.name or ""})
        return {"prompt": messages, _DATA: data.model_dump(mode="json", exclude_defaults=True)}


def _with_null(agent: Any) -> Any:
    """The settings of an agent whose harness is the one that is called `null`, which YAML reads as no value."""
    if isinstance(agent, Mapping) and isinstance(harness := agent.get("harness"), Mapping) and "id" in harness:
        return {**agent, "harness": {**harness, "id": harness["id"] or "null"}}
    return agent


def _plain(message: Any) -> dict[str, str]:
    parts = message.content
    if not isinstance(parts, str):
        parts = "\n".join(part.text for part in parts or () if part.type == "text")
    return {"role": message.role, "content": parts}


def _is_of_budget(error: Any) -> bool:
    """Whether the endpoint has refused a request with one of `BUDGET_CODES`: the message has its answer."""
    start = error.message.find("{")
    try:
        refused = json.loads(error.message[start:]) if start >= 0 else None
    except ValueError:
        return False
    return isinstance(refused, dict) and refused.get("error", {}).get("code") in BUDGET_CODES
