"""Members of a population that are no training runs: a noisy quadratic, whose best learning rate falls as it goes on.

    penstock population lr=1e-3:1 --trainable quadratic_member:Quadratic --score minus_loss

A `Trainable` (platform/run/population.py) has two methods. Here the checkpoint of a member is one JSON file.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

CURVATURES = (1.0, 0.3, 0.1, 0.03)
NOISE = 0.1


class Quadratic:
    """Gradient descent on sum(a_i x_i^2) / 2 with Gaussian noise on the gradient; the score is minus the loss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def branch(self, parent: str, name: str, step: int, keys: Mapping[str, float]) -> None:
        """Begin where the parent is: at `step`, whatever the new keys are."""
        del step, keys
        shutil.copyfile(self._folder / f"{parent}.json", self._folder / f"{name}.json")

    def train(self, name: str, step: int, keys: Mapping[str, float]) -> float:
        """Descend until `step` with the learning rate `lr`."""
        path = self._folder / f"{name}.json"
        state = json.loads(path.read_text()) if path.exists() else {"step": 0, "x": [1.0] * len(CURVATURES)}
        rng = random.Random(f"{name} {state['step']}")
        while state["step"] < step:
            state["x"] = [
                x - keys["lr"] * (curvature * x + rng.gauss(0.0, NOISE))
                for x, curvature in zip(state["x"], CURVATURES, strict=True)
            ]
            state["step"] += 1
        path.write_text(json.dumps(state))
        return -sum(curvature * x * x for x, curvature in zip(state["x"], CURVATURES, strict=True)) / 2
