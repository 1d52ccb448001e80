"""A `gymnasium.Env` as a multi-turn environment: `env=gymnasium env.args.id=my_package:MyEnv-v0`.

Observations are shown as text: `str(observation)`, or the result of `render()` with `render_mode="ansi"`. The policy
names an action by a word of `action_names`, or by its number. Any other turn is answered with the choices and counted.
Install with `pip install 'penstock[envs]'`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.import_path import import_extra
from penstock.envs.tasks.generated_tasks import GeneratedTasks

_MAX_SEED = 2**31 - 1
_WORD = re.compile(r"[\w-]+")


@dataclass(eq=False)
class GymnasiumTasks(GeneratedTasks):
    """Task source over seeds of one environment.

    Args:
        seed: Order of the training stream.
        id: Id for `gymnasium.make`; `module:Name-v0` imports the module first.
        kwargs: Further arguments of `gymnasium.make`.
        action_names: Word of each action of a discrete space, in order; None names them by number. No effect on other
            spaces: a text space gets the turn as it is.
        instruction: Text before the first observation.
        chat: Give the prompt as chat messages.
        reuse: Reset an environment for the next episode, as gymnasium does; otherwise make a new one for each.

    Raises:
        ConfigError: If gymnasium is not installed.
        ValueError: If it has no such environment, or the action space is neither discrete nor text.
    """

    id: str
    kwargs: Mapping[str, Any] | None = None
    action_names: Sequence[str] | None = None
    instruction: str = ""
    _: KW_ONLY
    chat: bool = True
    reuse: bool = True

    def __post_init__(self) -> None:
        self._played = self._make()
        self._names = _action_names(self._played, self.action_names)

    @property
    def name(self) -> str:
        """Prefix of the task ids."""
        return f"gymnasium/{self.id}"

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A seed, and the first observation under it."""
        seed = rng.randint(0, _MAX_SEED)
        observation, _ = self._played.reset(seed=seed)
        choices = f"Actions: {', '.join(self._names)}." if self._names else ""
        parts = [self.instruction, _as_text(self._played, observation), choices]
        text = "\n".join(part for part in parts if part)
        return {"prompt": [{"role": "user", "content": text}] if self.chat else text, "seed": seed}

    def environment(self) -> Environment:
        """A new environment."""
        return GymnasiumEpisode(self._make(), self._names, reusable=self.reuse)

    def _make(self) -> Any:
        gymnasium = import_extra("gymnasium")
        try:
            return gymnasium.make(self.id, **(self.kwargs or {}))
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"id={self.id!r}: gymnasium cannot make it: {error}") from error


class GymnasiumEpisode(Environment):
    """Episodes of one environment; the reward is the sum of the rewards of an episode's steps."""

    def __init__(self, played: Any, names: Sequence[str], *, reusable: bool) -> None:
        self.reusable = reusable
        self._played = played
        self._names = [name.lower() for name in names]

    def reset(self, task: Task) -> Observation:
        """Reset under the task's seed."""
        self.task = task
        self._played.reset(seed=task.fields["seed"])
        return Observation(task.prompt)

    def step(self, action: Action) -> Observation | Done:
        """One step, if the turn names an action."""
        chosen: Any = action.text
        if self._names:
            words = [word for word in _WORD.findall(action.text.lower()) if word in self._names]
            if not words:
                return Observation(f"No action. Choose one of: {', '.join(self._names)}.", counts={"no_action": 1.0})
            chosen = self._names.index(words[-1])
            chosen += int(self._played.action_space.start)
        observation, reward, is_terminated, is_truncated, _ = self._played.step(chosen)
        if is_terminated or is_truncated:
            return Done(float(reward))
        return Observation(_as_text(self._played, observation), reward=float(reward))

    def close(self) -> None:
        """Close the gymnasium environment."""
        self._played.close()


def _as_text(played: Any, observation: object) -> str:
    if isinstance(observation, str) or played.render_mode != "ansi":
        return str(observation)
    return str(played.render())


def _action_names(played: Any, names: Sequence[str] | None) -> list[str]:
    """Names of a discrete action space; none of a text space."""
    import gymnasium

    space = played.action_space
    if isinstance(space, gymnasium.spaces.Text):
        return []
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(  # noqa: TRY004  a refusal of an argument, as the others
            f"its action space is {space}; a policy writes Discrete or Text only. Wrap it."
        )
    if names is None:
        return [str(int(space.start) + index) for index in range(int(space.n))]
    if len(names) != space.n:
        raise ValueError(f"action_names has {len(names)} names, the environment has {space.n} actions")
    return checked_words([str(name) for name in names])


def checked_words(names: list[str]) -> list[str]:
    """Check that names of actions can be found in a turn and told apart.

    Raises:
        ValueError: If a name is not a single word, or two names differ only in case.
    """
    for name in names:
        if not _WORD.fullmatch(name):
            raise ValueError(
                f"action_names has {name!r}, which can never be chosen: a turn is searched for words of letters, "
                f"digits, _ and -. Call it e.g. {'_'.join(_WORD.findall(name)) or 'wait'!r}."
            )
    lowered = [name.lower() for name in names]
    twice = sorted({name for name in lowered if lowered.count(name) > 1})
    if twice:
        raise ValueError(f"action_names has {twice} more than once; case does not tell actions apart. Rename them.")
    return names
