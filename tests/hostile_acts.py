"""Acts of a hostile reward, environment or tool, and the expected records of their trajectories.

The processes under attack import this file, so it starts no process. The limits are those of `hostile_play.py`.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.tasks.generated_tasks import GeneratedTasks
from penstock.envs.tools.tool_environment import ToolEnvironment
from tests.hostile_reaches import REACHES


@dataclass(frozen=True, slots=True)
class HostileAct:
    """One act.

    Attributes:
        contained_by: The mechanism that contains it.
        reward: Expected text in the record of a trajectory whose reward does it; empty if it does no harm. ` | `
            separates alternatives, if several limits are close to each other; `&` joins texts that must all occur.
        step: The same for an environment's step.
        tool: The same for a tool. Records that begin with `error:` or are empty go to the model, and the episode
            continues. None if it is not tried there.
    """

    name: str
    contained_by: str
    reward: str
    step: str
    tool: str | None


_TIME, _DIES = "time-out, then the process is killed", "a process of its own, replaced"
_CHECKED, _SHOWN = "the reply is checked", "text is cut"
_STEP_TIME, _TOOL_TIME = "timed out after 6 s (env.episode.timeout_s)", "error: act took longer than 1.5 s"
_MEMORY, _PROCESSES = "more than {}.max_memory_gib=0.25", "more than {}.max_processes=24"
_ENV = "env.episode"
_KERNEL = "/proc/sys/kernel/core_pattern"
"""A write to it fails with different messages for root and for other users."""
_FORGED = "sent what is no reply"


def _everywhere(name: str, contained_by: str, record: str, tool: str | None = None) -> HostileAct:
    """The same record at every entry point, except for a tool whose error goes to the model."""
    return HostileAct(name, contained_by, record, record, record if tool is None else tool)


def _hangs(name: str) -> HostileAct:
    return HostileAct(name, _TIME, "timed out after 5 s", _STEP_TIME, _TOOL_TIME)


def _too_much(name: str, record: str, contained_by: str) -> HostileAct:
    of_episode = f"{record.format(_ENV)} | {_STEP_TIME}"
    of_reward = f"{record.format('reward')} | timed out after 5 s"
    return HostileAct(name, contained_by, of_reward, of_episode, f"{of_episode} | {_TOOL_TIME}")


def _reach(name: str, contained_by: str, record: str, grant: str) -> HostileAct:
    """The record of a reward and of a step also names the configuration key that would grant the permission."""
    of_reward = of_step = f"{record}&.isolation.{grant}" if grant.startswith(("v", "r", "n")) else record
    if grant == "=process":
        of_reward, of_step = (f"{record}&{section}.isolation=process" for section in ("reward", _ENV))
    return HostileAct(name, contained_by, of_reward, of_step, f"error: {record}")


def _forged(name: str) -> HostileAct:
    return HostileAct(name, _CHECKED, _FORGED, _FORGED, None)


ACTS = (
    _hangs("infinite loop"),
    _hangs("sleeps and ignores signals"),
    _hangs("leaves a daemon and hangs"),
    _too_much("many processes", _PROCESSES, "the supervisor counts processes every 50 ms; else the time-out"),
    _too_much("fork bomb", _PROCESSES, "the supervisor counts processes every 50 ms; else the time-out"),
    _too_much("memory bomb", _MEMORY, "the supervisor measures memory every 50 ms"),
    _everywhere("1 GB of output", "standard output is /dev/null", ""),
    _everywhere("os._exit", _DIES, "ended with exit code 7"),
    _everywhere("kills itself", _DIES, "was killed by SIGKILL"),
    _everywhere("kills its group", "a session of its own", "was killed by SIGKILL"),
    _everywhere("crashes the interpreter", _DIES, "was killed by SIGSEGV"),
    _everywhere("leaves a daemon", "orphans go to the supervisor", "ended with exit code 0"),
    _everywhere("leaves temporary files", "a folder for temporary files of its own", ""),
    HostileAct("writes into the socket", _CHECKED, "2 times in a row", _FORGED, _FORGED),
    _forged("empty reply"),
    _forged("reply of no object"),
    _forged("reply with nan"),
    _forged("reply with infinity"),
    _forged("reply without parts"),
    _everywhere(
        "exception with a huge message",
        _SHOWN,
        "ValueError: xxx",
        f"error: ValueError: xxx | {_TOOL_TIME}",
    ),
    HostileAct(
        "keyboard interrupt",
        "an exception, or a process of its own",
        "2 times in a row",
        "KeyboardInterrupt",
        "KeyboardInterrupt",
    ),
    _everywhere(
        "deep recursion",
        "the interpreter's limit",
        "RecursionError: maximum recursion depth exceeded",
        "error: RecursionError: maximum recursion depth",
    ),
    _everywhere(
        "unpicklable result", _CHECKED, "RuntimeError: not even a repr", "error: RuntimeError: not even a repr"
    ),
    HostileAct("nan", _CHECKED, "returned nan; expected a finite number", "with reward nan; expected a finite", ""),
    HostileAct("inf", _CHECKED, "returned -inf; expected a finite number", "with reward -inf; expected a finite", ""),
    HostileAct("huge integer", _CHECKED, "OverflowError", "OverflowError", ""),
    HostileAct("endless dict", _CHECKED, "a dict with 100000 entries", "a dict with 100000 entries", ""),
    HostileAct("long names", _SHOWN, "", "", ""),
    HostileAct("huge text", _SHOWN, "of type str; expected a number", "of type str; expected a number", ""),
    _everywhere(
        "reads the tracker's key",
        "not in the environment of the process",
        "KeyError: 'WANDB_API_KEY'",
        "error: KeyError: 'WANDB_API_KEY'",
    ),
    _reach("reads the host's environment", "an environment of harmless names", "KeyError: 'KNOWN", "variables=[KNOWN"),
    _reach("reads others' environments", "processes of its own", "FileNotFoundError", ""),
    _reach("reads home", "home is not there", "FileNotFoundError", "read=[/"),
    _reach("connects to the host", "no network but its own", "ConnectionRefusedError", "network=true"),
    _reach("connects to an abstract socket", "no network", "ConnectionRefusedError", "network=true"),
    _reach("connects to the outside", "no network", "OSError: [Errno 101] Network is unreachable", "network=true"),
    _reach("writes outside", "all but its own folder is read-only", "OSError: [Errno 30] Read-only", "=process"),
    HostileAct(
        "changes the kernel",
        "/proc is read-only",
        f"{_KERNEL}&reward.isolation=process",
        f"{_KERNEL}&{_ENV}.isolation=process",
        f"error: &{_KERNEL}",
    ),
    _reach("signals the run", "processes of its own", "ProcessLookupError", ""),
    _everywhere("kills its parent", "its parent is the sandbox's first process, which no process in it can kill", ""),
    _reach("kills all it sees", "processes of its own: there is none", "ProcessLookupError", ""),
    _reach("unmounts its mounts", "no capabilities", "FileNotFoundError", "read=[/"),
)
FINE = "fine"


def says(record: str, expected: str) -> bool:
    """Whether a record has the text that `HostileAct` expects."""
    return any(all(part in record for part in cause.split("&")) for cause in expected.split(" | "))


_REPLIES = {
    "empty reply": b"{}",
    "reply of no object": b"[]",
    "reply with nan": b'{"done": true, "reward": NaN, "parts": {}}',
    "reply with infinity": b'{"done": true, "reward": 1.0, "parts": {"a": 1e999}}',
    "reply without parts": b'{"reward": 1.0}',
}


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("never")

    def __repr__(self) -> str:
        raise RuntimeError("not even a repr")


_RETURNED: dict[str, Callable[[], object]] = {
    "unpicklable result": Unpicklable,
    "nan": lambda: float("nan"),
    "inf": lambda: -float("inf"),
    "huge integer": lambda: 10**400,
    "endless dict": lambda: {str(number): 1.0 for number in range(10**5)},
    "long names": lambda: {"n" * 10**7: 0.5},
    "huge text": lambda: "y" * (64 << 20),
}


def commit(what: str, nap: str, host: dict[str, Any]) -> object:  # noqa: C901  a list
    """Commit an act, and return the value that the user's code would return.

    Args:
        what: Name of an act, or `fine`.
        nap: Argument of `sleep` that identifies a daemon.
        host: Values of `hostile_reaches.lay_outside`.
    """
    if what in REACHES:
        REACHES[what](host)
    if what == "infinite loop":
        while True:
            pass
    if what == "sleeps and ignores signals":
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):  # some signals cannot be ignored, and only the main thread may try
                continue
        time.sleep(1000)
    if what == "many processes":
        for _ in range(60):
            if os.fork() == 0:
                time.sleep(1000)
                os._exit(0)  # not into the loop: if it is not contained, the machine survives
        time.sleep(1000)
    if what == "fork bomb":
        for _ in range(8):  # 256 processes: if it is not contained, the machine survives
            os.fork()
        time.sleep(1000)
    if what == "memory bomb":
        hoard: list[bytes] = []
        while len(hoard) < 256:  # 2 GiB, for the same reason
            hoard.append(b"x" * (8 << 20))
        time.sleep(1000)
    if what == "1 GB of output":
        for _ in range(1024):
            os.write(1, b"x" * (1 << 20))
    if what == "os._exit":
        os._exit(7)
    if what == "kills itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kills its group":
        os.killpg(0, signal.SIGKILL)
    if what == "crashes the interpreter":
        ctypes.string_at(0)
    if what.startswith("leaves a daemon"):
        command = ["setsid", "sh", "-c", f"sleep {nap} & exec sleep {nap}"]
        subprocess.Popen(command, start_new_session=True)
        if what.endswith("hangs"):
            time.sleep(1000)
        os._exit(0)
    if what == "leaves temporary files":
        with tempfile.NamedTemporaryFile(delete=False, prefix="left-behind-") as file:
            file.write(b"x")
    if what == "writes into the socket":
        _write_into_sockets(b"\xff" * 5000)
    if what in _REPLIES:
        _write_into_sockets(struct.pack("!IQ", len(_REPLIES[what]), _running_call()) + _REPLIES[what])
    if what == "exception with a huge message":
        raise ValueError("x" * (16 << 20))  # a few copies of it fit into the memory limits of the tests
    if what == "keyboard interrupt":
        raise KeyboardInterrupt
    if what == "deep recursion":
        _go_down()
    if what == "reads the tracker's key":
        return len(os.environ["WANDB_API_KEY"])
    return _RETURNED[what]() if what in _RETURNED else 0.5


def _write_into_sockets(data: bytes) -> None:
    for number in range(3, 64):
        try:
            if socket.socket(fileno=os.dup(number)).family == socket.AF_UNIX:
                os.write(number, data)
        except OSError:
            continue
    time.sleep(1000)


def _running_call() -> int:
    frame = sys._getframe()
    while "call_id" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return int(frame.f_locals["call_id"])


def _go_down() -> None:
    _go_down()


def reward(trajectory: Trajectory, nap: str = "", host: dict[str, Any] | None = None, **_: object) -> object:
    """The response names the act."""
    return commit(trajectory.response, nap, host or {})


class HostileEnvironment(ToolEnvironment):
    """A turn names an act of `step`, or calls a tool with it."""

    tool_timeout_s = 1.5

    def __init__(self) -> None:
        def act(what: str) -> object:
            """Do it."""
            return commit(what, self.task.fields["nap"], self.task.fields["host"])

        self.tools = [act]
        super().__init__()

    def score(self, task: Task, answer: str) -> float | dict[str, float]:
        return commit(answer, task.fields["nap"], task.fields["host"])  # type: ignore[return-value] # that is the point


class Tasks(GeneratedTasks):
    """The source of the environment; hostile_play.py makes the tasks."""

    def draw(self, rng: random.Random) -> dict[str, str]:
        return {"prompt": str(rng.random())}

    def environment(self) -> HostileEnvironment:
        return HostileEnvironment()
