"""The process that only makes tasks, in the interpreter of `env.python`.

Forked by its supervisor (supervisor.py) with `SOCKET_FD CONFIG`, the second an `EnvConfig` as JSON. It consumes request
frames from the socket, waits for nothing else, and is unblocked by the next frame. It ends when the socket closes.

Frames are as in reward_child.py, with JSON in both directions: the packages of the two interpreters differ, so neither
can unpickle what the other has made. A request is a list, for a task source with a seed:

    ["open", seed]                                     what the source offers besides its tasks
    ["tasks", seed, method, arguments, stream, start]  the next tasks of a stream of `method`, from task `start` on
    ["call", seed, method, task]                       what `method`, such as `gold_actions`, returns for a task
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypedDict, cast

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.contract import TaskSource
from penstock.envs.loading import load_task_source
from penstock.envs.reward_result import to_failure
from penstock.envs.workers.permission_hints import permission_hint
from penstock.envs.workers.reward_child import HEADER, HELLO_ID, MAX_REPLY_BYTES, encode_frame

OFFERED = ("environment", "gold_actions", "gold_response")
"""Methods that a task source may have besides `train` and `held_out`, and that its callers look for."""
MAX_TASKS = 64
"""Tasks of one reply."""


class TaskReply(TypedDict, total=False):
    """`offers`, or `tasks` with `is_over`, or `returned`, or what went wrong: `violations` of the configuration,
    `refused` by a ValueError, or another `error`.
    """

    offers: list[str]
    tasks: list[dict[str, Any]]
    is_over: bool
    returned: Any
    violations: list[str]
    refused: str
    error: str


def to_json(task: Task) -> dict[str, Any]:
    """A task of a source as a JSON object; the rest of its attributes is set by its receiver."""
    return {"task_id": task.task_id, "prompt": task.prompt, "fields": dict(task.fields)}


def to_task(found: dict[str, Any]) -> Task:
    """The task of a JSON object."""
    return Task(TaskId(found["task_id"]), found["prompt"], found["fields"])


def is_task_reply(reply: object) -> bool:
    """Whether it is a well-formed `TaskReply`; the user's code may have written other bytes into our socket."""
    if not isinstance(reply, dict):
        return False
    if "tasks" in reply:
        tasks = reply["tasks"]
        return isinstance(tasks, list) and all(map(_is_task, tasks)) and isinstance(reply.get("is_over"), bool)
    texts = [reply.get(name, "") for name in ("refused", "error")] + reply.get("violations", [])
    return all(isinstance(text, str) for text in [*texts, *reply.get("offers", [])])


def _is_task(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str | list):
        return False
    return isinstance(found.get("task_id"), str) and isinstance(found.get("fields"), dict)


class TaskServer:
    """The task sources of one configuration, each with its seed, and the streams that are being read."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self._sources: dict[int, TaskSource] = {}
        self._streams: dict[int, Iterator[Task]] = {}

    def answer(self, request: list[Any]) -> bytes:
        """The reply to one request, as JSON. What the user's code raises is a reply."""
        kind, *arguments = request
        methods: dict[str, Callable[..., TaskReply]] = {"open": self._open, "tasks": self._tasks, "call": self._call}
        try:
            reply = json.dumps(methods[kind](*arguments))
        except ConfigError as error:
            reply = json.dumps({"violations": [violation + permission_hint(error) for violation in error.violations]})
        except ValueError as error:
            reply = json.dumps({"refused": f"{error}{permission_hint(error)}"})
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code: anything it raises is reported
            reply = json.dumps({"error": to_failure(error)["error"]})
        if len(reply) > MAX_REPLY_BYTES:
            problem = f"{arguments[1]} returned {len(reply)} bytes; at most {MAX_REPLY_BYTES} fit"
            reply = json.dumps({"error": problem})
        return reply.encode()

    def _source(self, seed: int) -> TaskSource:
        if seed not in self._sources:
            self._sources[seed] = load_task_source(self._config, seed)
        return self._sources[seed]

    def _open(self, seed: int) -> TaskReply:
        source = self._source(seed)
        return {"offers": [name for name in OFFERED if hasattr(source, name)]}

    def _tasks(self, seed: int, method: str, arguments: list[Any], stream: int, start: int) -> TaskReply:
        if stream not in self._streams:  # at another start than 0 it was begun by an earlier process
            self._streams[stream] = islice(getattr(self._source(seed), method)(*arguments), start, None)
        tasks: list[dict[str, Any]] = []
        room = MAX_REPLY_BYTES // 2
        for task in islice(self._streams[stream], MAX_TASKS):
            tasks.append(_checked(task))
            room -= len(json.dumps(tasks[-1]))
            if room < 0:
                return {"tasks": tasks, "is_over": False}
        is_over = len(tasks) < MAX_TASKS
        if is_over:
            del self._streams[stream]
        return {"tasks": tasks, "is_over": is_over}

    def _call(self, seed: int, method: str, task: dict[str, Any]) -> TaskReply:
        return {"returned": getattr(self._source(seed), method)(to_task(task))}


def _checked(task: Task) -> dict[str, Any]:
    if not isinstance(task, Task):
        raise TypeError(f"the task source gave a {type(task).__name__} where a Task was expected")
    found = to_json(task)
    for name, value in [("prompt", task.prompt), *task.fields.items()]:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"env.factory: {name} of {task.task_id} cannot be sent to the run, since it is no JSON ({error}). "
                "Tasks of another interpreter hold texts, numbers, lists and objects."
            ) from None
    return found


def main(arguments: list[str]) -> None:
    """Send the hello, serve until the socket closes."""
    socket_fd, config = arguments
    connection = socket.socket(fileno=int(socket_fd))
    server = TaskServer(EnvConfig.model_validate_json(config))
    connection.sendall(encode_frame(HELLO_ID, b"{}"))
    reader = connection.makefile("rb")
    while header := reader.read(HEADER.size):
        length, call_id = HEADER.unpack(header)
        connection.sendall(encode_frame(call_id, server.answer(cast("list[Any]", json.loads(reader.read(length))))))
