"""The names of the threads of one episode, and whether the observations of an environment fit them.

    not open --an observation with a new name--> waiting --an observation with its name--> waiting …

A thread waits from the end of its turn to the observation that begins its next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import MAIN_THREAD, THREAD_PART, is_thread_reward
from penstock.envs.environment import Action, Observation, Role
from penstock.envs.workers.episode_child import EpisodeReply, ObservationReply
from penstock.envs.workers.episode_host import PlayedEpisode

MAX_NAME_CHARACTERS = 64


class ThreadNames:
    """The names seen so far; every reply may add some.

    Args:
        task_id: Named in error messages.
        max_threads: `env.episode.max_threads`.
    """

    def __init__(self, task_id: TaskId, max_threads: int) -> None:
        self._task_id = task_id
        self._max_threads = max_threads
        self._names: set[str] = set()

    def check(self, reply: EpisodeReply) -> list[Observation]:
        """Check a reply and return its observations; empty if it ends the episode.

        Raises:
            TrajectoryError: kind `env`, if an observation does not fit its thread, or a reward names an unknown thread.
        """
        if reply.get("done"):
            self._check_rewards(reply)
            return []
        observations = [_observation(one) for one in reply.get("several", [reply])]
        before = frozenset(self._names)
        addressed: set[str] = set()
        for one in observations:
            if one.thread in addressed:
                raise self._wrong(
                    f"two observations of one list are for {one.thread!r}; a thread has one turn at a time"
                )
            addressed.add(one.thread)
            if not one.thread or len(one.thread) > MAX_NAME_CHARACTERS:
                raise self._wrong(f"a thread is named {one.thread!r:.100}; use 1 to {MAX_NAME_CHARACTERS} characters")
            if one.fork_of is not None and one.thread in before:
                raise self._wrong(f"it forks {one.fork_of!r} into {one.thread!r}, which is open; use a new name")
            if one.fork_of is not None and one.fork_of not in before:
                raise self._wrong(f"it forks {one.fork_of!r}, which has had no turn; {self._there_are()}")
        self._names |= addressed
        if len(self._names) > self._max_threads:
            opened = f"it opens {len(self._names)} threads, env.episode.max_threads is {self._max_threads}"
            raise self._wrong(f"{opened}. Raise it, or continue with threads that are open: {self._there_are()}")
        return observations

    def _check_rewards(self, reply: EpisodeReply) -> None:
        given = [name.removeprefix(THREAD_PART) for name in reply.get("parts", {}) if is_thread_reward(name)]
        unknown = sorted(set(given) - self._names)
        if unknown:
            raise self._wrong(f"its thread_rewards name {', '.join(map(repr, unknown))}; {self._there_are()}")

    def _there_are(self) -> str:
        return f"there are {', '.join(map(repr, sorted(self._names))) or 'none'}"

    def _wrong(self, what: str) -> TrajectoryError:
        return TrajectoryError("env", f"{self._task_id}: {what}")


async def take_turns(played: PlayedEpisode, reply: EpisodeReply, actions: Sequence[Action]) -> EpisodeReply:
    """Send the turns after the last reply to the episode, and return its next reply.

    Raises:
        TrajectoryError: kind `env`, if it fails.
    """
    return await (played.step_all(actions) if "several" in reply else played.step(actions[0]))


def _observation(reply: ObservationReply) -> Observation:
    role, thread = cast("Role", reply["role"]), reply.get("thread", MAIN_THREAD)
    return Observation(
        reply["content"], role, thread=thread, fork_of=reply.get("fork_of"), tools=reply.get("tools", [])
    )
