"""The reward of the environment as a reward function: `reward=episode`."""

from __future__ import annotations

from penstock.dataflow.trajectory import Trajectory


def episode_reward(trajectory: Trajectory, **_: object) -> dict[str, float | str]:
    """Sum of the rewards of an episode's turns, with its named parts, and the answer if the environment names it.

    Raises:
        ValueError: If the task has no environment, or its agent program returned no reward.
    """
    episode = trajectory.episode
    if episode is None:
        raise ValueError(
            f"{trajectory.task_id} is a single-turn task, so no environment gave a reward. Name a function in "
            "reward.fn, or use a task source with environment() (envs/environment.py)."
        )
    if episode.reward is None:
        raise ValueError(
            f"{trajectory.task_id}: the agent program gave no reward. Let it print a number, or an object of numbers, "
            "as its last line; or name a function in reward.fn."
        )
    answer = {} if episode.answer is None or "answer" in episode.parts else {"answer": episode.answer}
    return {**episode.parts, "reward": episode.reward, **answer}
