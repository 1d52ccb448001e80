"""The interface of a multi-turn environment, which answers the policy turn by turn.

    class Echo(Environment):
        def step(self, action):
            return Done(1.0) if action.text == "bye" else Observation(action.text)

One object plays one episode: `open`, then `reset` once, then `step` for each turn of the policy until it returns `Done`
or a budget is exhausted (`env.episode`), then `close`; a `reusable` one plays further episodes in between. Every method
may be plain or `async`. An environment runs in a separate process (episode_host.py); an exception or a hang there fails
the attempt, and never becomes reward 0.

Several agents, and parallel drafts, are threads of one episode (docs/guides/several-agents.md): an observation names
its thread. A list of observations requests several concurrent turns, which `step_all` answers:

    class Debate(Environment):
        def reset(self, task):
            return [Observation(f"{task.prompt} You are {name}.", thread=name) for name in ("pro", "con")]

        def step_all(self, actions):
            return Done(0.0, thread_rewards={action.thread: judged(action.text) for action in actions})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import MAIN_THREAD
from penstock.envs.contract import TaskSource

Message = dict[str, str]
Role = Literal["user", "tool", "system"]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    text: str
    """Text without special tokens; if `env.reasoning` is set, the answer alone."""
    is_truncated: bool = False
    """The turn was truncated at `rollout.sampling.max_new_tokens` or at the budget of the episode."""
    turn: int = 0
    """Counted from 0, over all threads."""
    thread: str = MAIN_THREAD
    """Thread of the turn."""
    reasoning: str = ""
    """Text before the answer, marks included; empty if `env.reasoning` is not set."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn, or its prompt."""

    content: str | Sequence[Message]
    """Text, or several chat messages. A policy with plain prompts sees the text as it is; one with chat messages sees
    it through its chat template."""
    role: Role = "user"
    """Role of the message, if `content` is text."""
    reward: float = 0.0
    """Reward of the turn that was just taken, so 0 at reset; rewards of an episode are summed."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be summed over the episode and logged as `env/count/NAME`."""
    thread: str = MAIN_THREAD
    """Thread of the next turn. A new name opens a thread, with this observation as its whole prompt."""
    fork_of: str | None = None
    """Thread to fork: the new thread begins with all its tokens, followed by this observation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the policy may call, in the form of OpenAI. They are declared before the chat messages that begin a
    thread; no effect on later observations and on plain text."""

    @property
    def messages(self) -> list[Message]:
        """As chat messages."""
        return [{"role": self.role, "content": self.content}] if isinstance(self.content, str) else list(self.content)

    @property
    def text(self) -> str:
        """As plain text."""
        return self.content if isinstance(self.content, str) else "\n".join(part["content"] for part in self.content)


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an episode."""

    reward: float | Mapping[str, float | str] | None = 0.0
    """Reward of the last turn; a dict names parts, as for a reward function, and may hold the text `answer`. None is
    for agent programs without a reward: the reward function alone scores the trajectory."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """As in `Observation`."""
    thread_rewards: Mapping[str, float] = field(default_factory=dict)
    """Thread -> its own reward, compared with threads of the same name in the group. A thread without one gets the
    episode's reward. For `reward=episode`; other reward functions return parts `thread/NAME`."""


Observations = Observation | Sequence[Observation]
"""Begins one turn, or several concurrent turns, each in its thread."""


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """What an agent program needs to call the policy (envs/endpoint)."""

    base_url: str
    """Base URL of the OpenAI API."""
    api_key: str
    """Key of this session."""
    model: str
    """Name of the policy."""


@dataclass(frozen=True, slots=True)
class RunsItself:
    """Returned by `reset` of an agent program, which plays the episode itself, in `run(access)` (agents.py)."""


class Playable(ABC):
    """The episode of one trajectory: an `Environment`, or an agent program (agents.py)."""

    task: Task
    """Task of the episode."""
    reusable: bool = False
    """Whether `reset` removes all that an earlier episode has left. Then the object plays one episode after the other,
    and is closed at the end of the run. After an error, a time-out or a cancelled episode it is closed in either
    case."""

    def open(self) -> Awaitable[None] | None:
        """Prepare what no task is needed for: start a browser, load a repository.

        Called once, before the first `reset`, and ahead of it with `env.episode.warm`. It may take
        `env.episode.startup_timeout_s`.
        """
        return None

    @abstractmethod
    def reset(self, task: Task) -> Observations | RunsItself | Awaitable[Observations | RunsItself]:
        """Begin the episode of `task`."""

    def close(self) -> Awaitable[None] | None:
        """Release all resources. Called at most once, also after an error; not if the process dies."""
        return None


class Environment(Playable):
    """One episode. Keep its state on `self`, and what all share on the class or the module."""

    def reset(self, task: Task) -> Observations | Awaitable[Observations]:
        """Begin the episode of `task`; returns the whole prompt, by default the task's."""
        self.task = task
        return Observation(task.prompt)

    @abstractmethod
    def step(self, action: Action) -> Observations | Done | Awaitable[Observations | Done]:
        """Answer one turn of the policy."""

    def step_all(self, actions: Sequence[Action]) -> Observations | Done | Awaitable[Observations | Done]:
        """Answer the turns of a list of observations, in the order of the list."""
        raise NotImplementedError(
            f"{type(self).__name__} returned a list of observations, whose turns are answered by step_all(actions). "
            "Define it, or return one Observation."
        )


@runtime_checkable
class EnvironmentSource(TaskSource, Protocol):
    """A task source whose tasks are played in several turns.

    It may have `gold_actions(task) -> list[str]`, which `penstock env check` plays: actions that reach full reward, in
    order; for concurrent turns, in the order of their observations.
    """

    def environment(self) -> Playable:
        """A new environment, which can play any task of this source."""
        ...
