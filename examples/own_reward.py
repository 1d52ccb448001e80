"""A reward of your own for episodes: what the environment gave, less a little for every turn."""


def quick(trajectory, **_):
    return trajectory.episode.reward - 0.01 * len(trajectory.episode.turns)
