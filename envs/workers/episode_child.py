"""The process that only plays episodes of the user's environments.

Forked by its supervisor (supervisor.py) with `SOCKET_FD FACTORIES SEED`, the second a JSON object name -> `EnvConfig`.
It consumes request frames from the socket, waits for nothing else, and is unblocked by the next frame. It ends when the
socket closes.

Every environment has a thread with its own event loop, from `open` to `close`, so a step that blocks does not delay
other episodes. Threads cannot be killed: when a call hangs, the parent retires this process and starts another
(episode_host.py).

Request frame: as in reward_child.py; the body is a pickle of `(environment, method, argument)`, where the argument of
`open` names the task source. The argument is pickled separately, so that a task that cannot be unpickled fails only its
own episode.
Reply frame: a JSON object, an `EpisodeReply`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import pickle
import queue
import resource
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, get_args

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import MAIN_THREAD, THREAD_PART
from penstock.envs.config import EnvConfig
from penstock.envs.environment import Done, EnvironmentSource, Observation, Playable, Role, RunsItself
from penstock.envs.loading import load_task_source
from penstock.envs.reward_result import are_finite, are_parts, to_failure, to_reply
from penstock.envs.workers.permission_hints import permission_hint
from penstock.envs.workers.reward_child import HEADER, HELLO_ID, MAX_REPLY_BYTES, encode_frame

_INTERRUPTING = ("close", "cut_off")
"""Methods without an argument, which end a running call."""


class ObservationReply(TypedDict, total=False):
    """An observation as a JSON object. Without `thread` it is for `main`."""

    content: str | list[dict[str, str]]
    role: str
    thread: str
    fork_of: str
    tools: list[dict[str, Any]]


class EpisodeReply(ObservationReply, total=False):
    """An observation, or `several` observations, or `done`, `runs_itself`, `opened`, `closed`, or an `error`."""

    several: list[ObservationReply]
    done: bool
    reward: float
    parts: dict[str, float]
    counts: dict[str, float]
    answer: str
    runs_itself: bool
    opened: bool
    reusable: bool
    closed: bool
    error: str


def to_episode_reply(returned: object, method: str) -> EpisodeReply:
    """Turn the return value of an environment into a reply, or into an error that states what was expected."""
    if isinstance(returned, RunsItself) and method == "reset":
        return {"runs_itself": True}
    if isinstance(returned, Done) and method in ("run", "cut_off") and returned.reward is None:
        return {"done": True}
    if isinstance(returned, list | tuple) and returned and all(isinstance(one, Observation) for one in returned):
        return _from_several(returned, method)
    if not isinstance(returned, Observation) and not (isinstance(returned, Done) and method != "reset"):
        expected = "Observation, a list of them" + ("" if method == "reset" else ", or Done")
        return {"error": f"{method} returned {returned!r:.200} of type {type(returned).__name__}; expected {expected}"}
    return _from_one(returned, method)


def _from_several(returned: Sequence[Observation], method: str) -> EpisodeReply:
    """A reply of several observations, with rewards and counts summed."""
    reply: EpisodeReply = {"reward": 0.0, "parts": {}, "counts": {}, "several": []}
    for one in returned:
        taken = _from_one(one, method)
        if "error" in taken:
            return taken
        reply["reward"] += taken["reward"]
        for name, value in taken["counts"].items():
            reply["counts"][name] = reply["counts"].get(name, 0.0) + value
        reply["several"].append(_to_observation_reply(one))
    return reply


def _from_one(returned: Observation | Done, method: str) -> EpisodeReply:
    what = f"{method} returned {type(returned).__name__} with reward"
    scored = to_reply(returned.reward, what, may_abstain=False)
    told = f"{method} returned {type(returned).__name__} with counts"
    counted = to_reply(dict(returned.counts) or 0.0, told, may_abstain=False)
    if "error" in scored or "error" in counted:
        return {"error": scored.get("error") or counted["error"]}
    if method == "reset" and scored["reward"]:
        return {"error": f"{what} {scored['reward']:g}; expected 0: no turn has been taken. Give it in the first step"}
    reply: EpisodeReply = {"reward": scored["reward"], "parts": scored["parts"], "counts": counted["parts"]}
    if isinstance(returned, Done):
        told = f"{method} returned Done with thread_rewards"
        of_threads = to_reply(dict(returned.thread_rewards) or 0.0, told, may_abstain=False)
        if "error" in of_threads:
            return {"error": of_threads["error"]}
        reply["parts"] |= {f"{THREAD_PART}{name}": value for name, value in of_threads["parts"].items()}
        reply["done"] = True
        if "answer" in scored:
            reply["answer"] = scored["answer"]
        return reply
    content = returned.content if isinstance(returned.content, str) else list(returned.content)
    if not _is_content(content) or returned.role not in get_args(Role):
        return {
            "error": f"{method} returned an Observation with role {returned.role!r} and content {content!r:.200}; "
            f"expected one of {', '.join(get_args(Role))}, and text or messages with role and content"
        }
    if not all(isinstance(name, str) for name in (returned.thread, returned.fork_of) if name is not None):
        names = f"thread {returned.thread!r:.100} and fork_of {returned.fork_of!r:.100}"
        return {"error": f"{method} returned an Observation with {names}; expected names, as text"}
    if not _are_objects(list(returned.tools)):
        return {"error": f"{method} returned an Observation with tools {returned.tools!r:.200}; expected objects"}
    return {**reply, **_to_observation_reply(returned)}


def _to_observation_reply(observation: Observation) -> ObservationReply:
    """Encode an observation; fields with their default are left out."""
    content = observation.content if isinstance(observation.content, str) else list(observation.content)
    reply: ObservationReply = {"content": content, "role": observation.role}
    if observation.thread != MAIN_THREAD:
        reply["thread"] = observation.thread
    if observation.fork_of is not None:
        reply["fork_of"] = observation.fork_of
    if observation.tools:
        reply["tools"] = [dict(tool) for tool in observation.tools]
    return reply


def _is_content(content: object) -> bool:
    """Text, or messages with role and content."""
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in content
    )


def _are_objects(tools: object) -> bool:
    return isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)


def is_episode_hello(hello: object) -> bool:
    """Whether it is a well-formed hello; the user's code may have written other bytes into our socket."""
    return isinstance(hello, dict) and isinstance(hello.get("error", ""), str)


def is_episode_reply(reply: object) -> bool:
    """Whether it is a well-formed `EpisodeReply`."""
    if not isinstance(reply, dict):
        return False
    if "error" in reply:
        return isinstance(reply["error"], str)
    if not (are_finite([reply.get("reward", 0.0)]) and all(are_parts(reply.get(n, {})) for n in ("parts", "counts"))):
        return False
    if not isinstance(reply.get("answer", ""), str):
        return False
    if "several" in reply:
        return (
            isinstance(reply["several"], list)
            and bool(reply["several"])
            and all(map(_is_observation_reply, reply["several"]))
        )
    if "content" in reply:
        return _is_observation_reply(reply)
    if not isinstance(reply.get("reusable", False), bool):
        return False
    return any(reply.get(name) is True for name in ("done", "runs_itself", "opened", "closed"))


def _is_observation_reply(reply: object) -> bool:
    """Whether it is a well-formed `ObservationReply`."""
    if not isinstance(reply, dict):
        return False
    if not _is_content(reply.get("content")) or reply.get("role") not in get_args(Role):
        return False
    if not _are_objects(reply.get("tools", [])):
        return False
    return all(isinstance(reply.get(name, ""), str) for name in ("thread", "fork_of"))


async def call_environment(environment: Playable, method: str, argument: Any) -> Any:
    """Call a plain or asynchronous method."""
    returned = getattr(environment, method)(*([] if method in ("open", *_INTERRUPTING) else [argument]))
    return await returned if inspect.isawaitable(returned) else returned


class EnvironmentThread:
    """Runs the calls of one environment one after the other, from `open` to `close`."""

    def __init__(self, make: Callable[[str], Playable], answer: Callable[[int, EpisodeReply], None]) -> None:
        self._make = make
        self._answer = answer
        self._calls: queue.SimpleQueue[tuple[int, str, bytes]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def call(self, call_id: int, method: str, argument: bytes) -> None:
        """Queue a call with a pickled argument. `close` and `cut_off` also cancel the running call, if it is async."""
        running = self._running
        self._calls.put((call_id, method, argument))
        if method in _INTERRUPTING and running is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(running.cancel)

    def _play(self) -> None:
        environment: Playable | None = None
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            while True:
                call_id, method, packed = self._calls.get()
                try:
                    argument = pickle.loads(packed)  # noqa: S301  written by our own parent
                    if method == "open":
                        environment = self._make(argument)
                    if environment is not None:  # otherwise it could not be made, and this call is `close`
                        reply = runner.run(self._call(environment, method, argument))
                except BaseException as error:  # noqa: BLE001  user code is data; this thread gets no real interrupts
                    reply = {"error": to_failure(error)["error"]}
                if method == "close":
                    break
                self._answer(call_id, reply)
        # Answer only after its loop has closed: if the loop still waits for a thread, that is a hang too.
        self._answer(call_id, {"closed": True})

    async def _call(self, environment: Playable, method: str, argument: Any) -> EpisodeReply:
        if method == "close":
            await call_environment(environment, method, argument)
            return {"closed": True}
        self._running = asyncio.current_task()
        try:
            returned = await call_environment(environment, method, argument)
            if method == "open":
                return {"opened": True, "reusable": bool(environment.reusable)}
            return to_episode_reply(returned, method)
        finally:
            self._running = None


class EpisodeServer:
    """Reads frames, dispatches them to the environments, and writes their replies."""

    def __init__(self, sources: dict[str, EnvironmentSource], connection: socket.socket) -> None:
        self._sources = sources
        self._connection = connection
        self._environments: dict[int, EnvironmentThread] = {}
        self._writing = threading.Lock()

    def serve(self) -> None:
        reader = self._connection.makefile("rb")
        while header := reader.read(HEADER.size):
            length, call_id = HEADER.unpack(header)
            number, method, argument = pickle.loads(reader.read(length))  # noqa: S301  written by our own parent
            if method == "open":
                self._environments[number] = EnvironmentThread(self._make, self.answer)
            if number not in self._environments:
                self.answer(call_id, {"closed": True})  # it was abandoned before its opening was requested
                continue
            thread = self._environments[number]
            if method == "close":
                del self._environments[number]
            thread.call(call_id, method, argument)

    def _make(self, name: str) -> Playable:
        if name not in self._sources:
            raise LookupError(f"the task names the environment {name!r}; there are {sorted(self._sources)}")
        return self._sources[name].environment()

    def answer(self, call_id: int, reply: EpisodeReply) -> None:
        """Write one reply. Thread-safe."""
        try:
            body = json.dumps(reply).encode()
        except (TypeError, ValueError) as error:
            body = json.dumps({"error": f"counts or content are not plain data: {error}"}).encode()
        if len(body) > MAX_REPLY_BYTES:
            problem = f"an observation of {len(body)} bytes; at most {MAX_REPLY_BYTES} fit"
            body = json.dumps({"error": problem}).encode()
        with self._writing, contextlib.suppress(OSError):  # the parent has exited
            self._connection.sendall(encode_frame(call_id, body))


def main(arguments: list[str]) -> None:
    """Load the environments, send the hello, serve until the socket closes."""
    socket_fd, factories, seed = arguments
    # Every environment needs file descriptors for its loop, and an agent program for its pipes.
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    connection = socket.socket(fileno=int(socket_fd))
    sources: dict[str, EnvironmentSource] = {}
    server = EpisodeServer(sources, connection)
    try:
        for name, config in json.loads(factories).items():
            source = load_task_source(EnvConfig.model_validate(config), int(seed))
            if isinstance(source, EnvironmentSource):
                sources[name] = source
    except ConfigError as error:
        server.answer(HELLO_ID, {"error": " ".join(error.violations) + permission_hint(error)})
        return
    except Exception as error:  # noqa: BLE001  user code: anything it raises is reported
        server.answer(HELLO_ID, {"error": to_failure(error)["error"]})
        return
    server.answer(HELLO_ID, {})
    server.serve()
