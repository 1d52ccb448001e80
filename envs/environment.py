"""What a multi-turn task is made of: an environment that answers the policy, turn by turn.

    class Echo(Environment):
        def step(self, action):
            return Done(1.0) if action.text == "bye" else Observation(action.text)

One object plays one episode: `reset` once, then `step` for each turn of the policy until it returns `Done` or a budget
runs out (`env.episode`), then `close`. Every method may be plain or `async`. An environment runs in a process of its
own (episode_host.py); what raises or hangs there fails the attempt, and is never reward 0.

Several agents, and parallel drafts, are threads of one episode (docs/concepts/threads.md): an observation names the
thread it is for. A list of them asks for several turns at the same time, which `step_all` answers:

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
from typing import Literal, Protocol, runtime_checkable

from penstock.dataflow.trajectory import MAIN_THREAD, Task
from penstock.envs.contract import TaskSource

Message = dict[str, str]
Role = Literal["user", "tool", "system"]


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said in one turn.

    Attributes:
        text: Without special tokens; where `env.reasoning` is set, the answer alone.
        is_truncated: The turn was cut off at `rollout.sampling.max_new_tokens` or at the budget of the episode.
        turn: Counted from 0, over all threads.
        thread: Where it was said.
        reasoning: Text before the answer, marks included; empty where `env.reasoning` is not set.
    """

    text: str
    is_truncated: bool = False
    turn: int = 0
    thread: str = MAIN_THREAD
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment says.

    Attributes:
        content: Text, or several chat messages. A policy with plain prompts sees the text as it is; one with chat
            messages sees it through its chat template.
        role: Of the message, if `content` is text.
        reward: For the turn that was just taken, so 0 at reset; rewards of an episode are summed.
        counts: Numbers to be summed over the episode and logged as `env/count/NAME`.
        thread: Whose turn is next. A name that is new opens a thread, with this as its whole prompt.
        fork_of: The new thread begins with all tokens of that one instead, and this goes behind them.
    """

    content: str | Sequence[Message]
    role: Role = "user"
    reward: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    thread: str = MAIN_THREAD
    fork_of: str | None = None

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
    """The end of an episode.

    Attributes:
        reward: For the last turn; a dict names parts, as a reward function's. An agent program that says none gives
            None: its trajectory is scored by the reward function alone.
        counts: As in `Observation`.
        thread_rewards: Thread -> its own reward, compared with those of the same name in the group. A thread without
            one has the episode's. With `reward=episode`; other reward functions return them as parts `thread/NAME`.
    """

    reward: float | Mapping[str, float] | None = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    thread_rewards: Mapping[str, float] = field(default_factory=dict)


Observations = Observation | Sequence[Observation]
"""One turn is next, or several at the same time, each in its thread."""


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """What a program needs to ask the policy (envs/endpoint).

    Attributes:
        base_url: Of the OpenAI API.
        api_key: Of this session alone.
        model: Name of the policy.
    """

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class RunsItself:
    """What `reset` of an agent program returns: it plays the episode itself, in `run(access)` (agents.py)."""


class Playable(ABC):
    """What a process plays for one trajectory: an `Environment`, or an agent program (agents.py)."""

    task: Task

    @abstractmethod
    def reset(self, task: Task) -> Observations | RunsItself | Awaitable[Observations | RunsItself]:
        """Begin the episode of `task`."""

    def close(self) -> Awaitable[None] | None:
        """Give back what the episode holds. Called at most once, also after an error; a process may die before it."""
        return None


class Environment(Playable):
    """One episode. Keep what belongs to it on `self`; what is shared and expensive at the class or the module."""

    def reset(self, task: Task) -> Observations | Awaitable[Observations]:
        """Begin the episode of `task`; returns the whole prompt, by default that of the task."""
        self.task = task
        return Observation(task.prompt)

    @abstractmethod
    def step(self, action: Action) -> Observations | Done | Awaitable[Observations | Done]:
        """Answer one turn of the policy."""

    def step_all(self, actions: Sequence[Action]) -> Observations | Done | Awaitable[Observations | Done]:
        """Answer the turns behind a list of observations, in the order of the list."""
        raise NotImplementedError(
            f"{type(self).__name__} returned a list of observations, whose turns are answered by step_all(actions). "
            "Define it, or return one Observation."
        )


@runtime_checkable
class EnvironmentSource(TaskSource, Protocol):
    """A task source whose tasks are played in several turns.

    It may have `gold_actions(task) -> list[str]`, which `penstock env check` plays: one action after the other, up to
    full reward; of turns at the same time, those of the first observation first.
    """

    def environment(self) -> Playable:
        """A fresh environment for one episode."""
        ...
