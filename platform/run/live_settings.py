"""`penstock set`: keys that a run takes over while it trains, and the history of its configuration.

    words ─▶ checked as one configuration ─▶ the ranks, between two steps ─▶ the driver ─▶ config.yaml, history, metrics

What is answered has been written, so a run that is killed or goes back to a checkpoint has the new value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.configuration import check_config
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.run import Run
from penstock.platform.run.saved_config import changed_config, differences, write_changed

SETTABLE = (
    "total_steps",
    "trainer.optimizer.lr",
    "trainer.optimizer.warmup_steps",
    "trainer.optimizer.stable_steps",
    "trainer.optimizer.decay_steps",
    "trainer.optimizer.decay",
    "trainer.optimizer.final_lr_ratio",
    "evaluation.every_steps",
    "evaluation.num_tasks_during_training",
    "evaluation.patience",
    "checkpoint.every_minutes",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "checkpoint.keep_every",
)
"""Keys that every step reads again: no process has to be restarted for them."""


class LiveSettings:
    """Takes over changed keys. Consumes: the words of `penstock set`. Waits for: the running step. One at a time."""

    def __init__(self, run: Run, run_dir: Path, note: Callable[[str], None]) -> None:
        self._run = run
        self._run_dir = run_dir
        self._note = note
        self._one_at_a_time = asyncio.Lock()

    async def set(self, words: Any, progress: Callable[[str], None]) -> str:
        """Take over `KEY=VALUE` words, all or none; returns one sentence.

        Raises:
            PenstockError: If one of them is refused.
        """
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise PenstockError("set: give at least one KEY=VALUE, e.g. trainer.optimizer.lr=1e-6.")
        async with self._one_at_a_time:
            before = self._run.config
            config = await asyncio.to_thread(changed, before, words, self._run_dir)
            found = differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
            keys = {key: values for key, values in found.items() if key in SETTABLE}
            if not keys:
                return f"nothing changes: the run has {', '.join(words)} already"
            if config.total_steps <= (version := self._run.trained_version):
                raise PenstockError(
                    f"set: total_steps={config.total_steps}: the run has trained {version} steps. The least is "
                    f"{version + 1}; Ctrl-C, or SIGTERM to its process, ends it now."
                )
            progress("waiting for the end of the running step")
            version = await self._run.change(config)
            write_changed(self._run_dir, config, version, keys, by="set")
            said = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in keys.items())
            self._note(f"penstock set: {said}, from step {version + 1} on")
            return f"{said}, from step {version + 1} on"


def changed(config: RunConfig, words: list[str], run_dir: Path) -> RunConfig:
    """The configuration with the words, if a run that goes on can take them over.

    Raises:
        PenstockError: If not, for each word.
    """
    keys = [word.partition("=")[0] for word in words]
    if refused := [key for key in keys if key not in SETTABLE]:
        raise ConfigError(
            [
                f"{key}: a run that goes on cannot take it over. It can: {', '.join(SETTABLE)}. Others: end the run "
                f"and `penstock resume {run_dir} {key}=…`, or `--as NEW` for another run."
                for key in refused
            ]
        )
    found = changed_config(config.model_dump(mode="json"), words, run_dir)
    if problems := [finding.message for finding in check_config(found, "train") if finding.refuses(dry_run=True)]:
        raise ConfigError(problems)
    return found
