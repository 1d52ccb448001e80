"""`penstock set`: keys that a run takes over while it trains, and the history of its configuration.

    words ─▶ checked as one configuration ─▶ the ranks, between two steps ─▶ the driver ─▶ config.yaml, history, metrics

What is answered as done has been written, so a run that is killed or goes back to a checkpoint has the new value, and
so has one that `resume=auto` continues with the command line that began it (`with_what_was_set`).
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.configuration import check_config
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.run import Run
from penstock.platform.run.saved_config import (
    changed_config,
    differences,
    flat,
    read_history,
    read_saved_config,
    write_changed,
)

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
            # The files keep the paths as the user wrote them; on a joined cluster those of the run are absolute.
            saved, now = read_saved_config(self._run_dir), self._run.config.model_dump(mode="json")
            written = await asyncio.to_thread(changed, saved, words, self._run_dir)
            config = await asyncio.to_thread(changed_config, now, words, self._run_dir)
            found = differences(saved, written.model_dump(mode="json"))
            keys = {key: values for key, values in found.items() if key in SETTABLE}
            if not keys:
                return f"nothing changes: the run has {', '.join(words)} already"
            version = self._run.trained_version
            if self._run.has_trained:
                raise PenstockError(
                    f"set: the run trains no step after {version}, so nothing would take over {', '.join(words)}. Once "
                    f"it has ended, a larger total_steps trains on: penstock resume {self._run_dir} "
                    f"{shlex.join(words) if 'total_steps' in keys else f'total_steps={2 * version}'}"
                )
            if config.total_steps <= version:
                raise PenstockError(
                    f"set: total_steps={config.total_steps}: the run has trained {version} steps. The least is "
                    f"{version + 1}; Ctrl-C, or SIGTERM to its process, ends it now."
                )
            progress("waiting for the end of the running step")
            version = await self._run.change(config)
            said = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in keys.items())
            said += f", from step {version + 1} on"
            self._note(f"penstock set: {said}")
            try:
                write_changed(self._run_dir, written, version, keys, by="set")
            except OSError as error:
                raise PenstockError(
                    f"set: {said}; but it could not be written ({error}), so a run that is killed would go back to the "
                    "values before. Free space on the disk, and give the same command again."
                ) from error
            return said


def changed(saved: Mapping[str, Any], words: list[str], run_dir: Path) -> RunConfig:
    """The configuration that a run has written with the words, if a run that goes on can take them over.

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
    found = changed_config(saved, words, run_dir)
    if problems := [finding.message for finding in check_config(found, "train") if finding.refuses(dry_run=True)]:
        raise ConfigError(problems)
    return found


def with_what_was_set(config: RunConfig, run_dir: Path) -> RunConfig:
    """The configuration of a command line with what `penstock set` has changed in the run since then.

    A key that the command line gives another value than when the run took it over was changed on purpose, and stays.
    """
    was_set: dict[str, tuple[Any, Any]] = {}
    for row in read_history(run_dir):
        before, _ = was_set.pop(row["key"], (row["before"], None))
        if row["by"] == "set":
            was_set[row["key"]] = before, row["now"]
    given, words = flat(config.model_dump(mode="json")), []
    for key, (before, now) in was_set.items():
        if given.get(key) == before != now:
            words.append(f"{key}={json.dumps(now)}")
            print(f"{key}={now}, not {before} as on the command line: `penstock set` has changed it")
        elif given.get(key) != now:
            print(f"{key}={given.get(key)}, as on the command line, which was changed since `penstock set {key}={now}`")
    return changed_config(config.model_dump(mode="json"), words, run_dir, typed=config.typed) if words else config
