"""Lights Out, a `gymnasium.Env` of your own: a switch toggles its light and the lights beside it; all should be off.

    cd examples
    penstock env play gymnasium id=lights_out:LightsOut-v0 kwargs.render_mode=ansi
    penstock train experiment=text env=gymnasium env.args.id=lights_out:LightsOut-v0 env.args.kwargs.render_mode=ansi \\
        'env.args.instruction=Press one switch a turn. Each 1 is a light that is on. Turn all off.' \\
        env.episode.max_turns=6 reward=episode name=lights_out

Importing the module registers the id, which is all that gymnasium asks for. Needs `pip install 'penstock[envs]'`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete, MultiBinary


class LightsOut(gymnasium.Env[np.ndarray, np.int64]):
    """Reward 1 for the press after which no light is on.

    Args:
        num_lights: Lights in a row, each with a switch.
        num_pressed: Different switches that made the first row, so that so many presses solve it.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, num_lights: int = 5, num_pressed: int = 2, render_mode: str | None = None) -> None:
        self.action_space = Discrete(num_lights, start=1)
        self.observation_space = MultiBinary(num_lights)
        self.render_mode = render_mode
        self.num_pressed = num_pressed
        self.lights = np.zeros(num_lights, np.int8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.lights[:] = 0
        while not self.lights.any():  # pressing 1, 2, 4 and 5 of five changes nothing
            for switch in self.np_random.choice(len(self.lights), self.num_pressed, replace=False):
                self.press(int(switch))
        return self.lights.copy(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.press(int(action) - 1)
        is_over = not self.lights.any()
        return self.lights.copy(), float(is_over), is_over, False, {}

    def render(self) -> str:
        return "".join(map(str, self.lights))

    def press(self, switch: int) -> None:
        self.lights[max(switch - 1, 0) : switch + 2] ^= 1


gymnasium.register("LightsOut-v0", entry_point=LightsOut)
