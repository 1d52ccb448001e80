"""The Ray actor around a landing: one on every node with engines, where weights come from other nodes."""

from __future__ import annotations

import os
import shutil

import ray

from penstock.weights.transport.crossing import Crossing, Landing
from penstock.weights.transport.shared_memory import private_directory


class LandingActor:
    """A landing in its own process."""

    def __init__(self, publish_in: str | None) -> None:
        self._directory = private_directory(publish_in)
        self._landing = Landing(str(self._directory))

    def join(self, crossing: Crossing, node: str) -> None:
        """Meet everyone else; the crossing before is left."""
        self._landing.join(crossing, node)

    def receive(self, version: int) -> str:
        """Receive a version; returns the folder where engines find it."""
        return self._landing.receive(version)

    @ray.method(concurrency_group="beside")
    def pid(self) -> int:
        """Answers also while a version is on its way."""
        return os.getpid()

    def shutdown(self) -> None:
        """Leave, and free the shared memory."""
        self._landing.close()
        shutil.rmtree(self._directory, ignore_errors=True)
