"""`penstock set` with a run that only keeps its configuration, and what `resume=auto` takes over of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.session import with_absolute_paths
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.run_record import read_run
from penstock.platform.metrics.summary import write_staleness, write_summary
from penstock.platform.run import controller, resume, saved_config, training
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.lifecycle import write_failure
from penstock.platform.run.live_settings import LiveSettings
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir, read_json
from penstock.platform.run.saved_config import read_history, read_saved_config
from penstock.platform.run.training import unstarted_summary
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.runs import run_of
from tests.small_run import small_run_overrides

STEPS, LATER, TRAINED = 200, 400, 60
RUN_DIR = Path("runs/made")


@dataclass
class Running:
    """What `LiveSettings` asks a run."""

    config: RunConfig
    trained_version: int = TRAINED
    has_trained: bool = False

    async def change(self, config: RunConfig) -> int:
        self.config = config
        return self.trained_version


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """The configuration of the command line that began the run, which has more words at the end."""
    monkeypatch.chdir(tmp_path)
    words = small_run_overrides(tmp_path, "made", character_tokenizer(), "resume=auto", f"total_steps={STEPS}")

    def compose(*more: str) -> RunConfig:
        return compose_config([*words, *more])

    prepare_run_dir(compose())
    return compose


def set_keys(run: Running, *words: str) -> str:
    return asyncio.run(LiveSettings(run, RUN_DIR, print).set(list(words), print))  # type: ignore[arg-type]


def stop_at(version: int) -> None:
    """The run is preempted, with a checkpoint."""
    folder = CheckpointFolder(RUN_DIR)
    folder.prepare()
    manifest: dict[str, Any] = {
        "version": version,
        "incarnation": 0,
        "trainer_files": [],
        "spooled": {},
        "files": [],
        "run": {"evaluations": [], "config": read_saved_config(RUN_DIR)},
    }
    folder.commit(folder.unfinished(version), FlowSnapshot({}, (), ()), manifest)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations with which `resume` trains on."""
    found: list[RunConfig] = []
    monkeypatch.setattr(training, "train_in", lambda config, *_: found.append(config) or 0)
    return found


def test_the_command_line_that_began_a_run_continues_it_with_what_was_set(
    typed: Callable[..., RunConfig], trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    rate = typed().trainer.optimizer.lr
    run = Running(typed())
    set_keys(run, "total_steps=300", "trainer.optimizer.lr=3e-5")
    set_keys(run, f"total_steps={LATER}", "checkpoint.keep_every=7", "trainer.optimizer.decay=cosine")
    for stopped_at in (300, 350):
        stop_at(stopped_at)
        assert resume.train(typed()) == 0
    said = capsys.readouterr().out
    assert said.count(f"total_steps={LATER}, not {STEPS} as on the command line: `penstock set` has changed it\n") == 2
    assert said.count(f"trainer.optimizer.lr=3e-05, not {rate} as on the command line") == 2
    for config in trained:
        optimizer = config.trainer.optimizer
        assert (config.total_steps, config.checkpoint.keep_every) == (LATER, 7)
        assert (optimizer.lr, optimizer.decay) == (3e-5, "cosine")
        assert config.is_typed("name"), "what was typed still counts as typed"
        assert config.is_typed("trainer.optimizer.lr")
    assert len(trained) == 2
    assert read_saved_config(RUN_DIR)["total_steps"] == LATER
    assert {row["by"] for row in read_history(RUN_DIR)} == {"set"}


def test_a_run_that_was_resumed_shows_neither_the_figures_nor_the_error_of_its_earlier_end(
    typed: Callable[..., RunConfig], trained: list[RunConfig]
) -> None:
    summary = unstarted_summary(typed(), "failed", 50, 9.0, 1.0)
    write_summary(RUN_DIR, replace(summary, policy_version=50))
    write_staleness(RUN_DIR, {0: 10})
    write_failure(RUN_DIR, PenstockError("yesterday's"))
    assert "The run has failed" in write_report(RUN_DIR).read_text()
    stop_at(40)
    assert resume.train(typed()) == 0
    assert trained
    record = read_run(RUN_DIR)
    assert (record.summary, record.staleness, record.error) == ({}, {}, "")
    page = write_report(RUN_DIR).read_text()
    assert "The run has failed" not in page
    assert "summary.json and staleness.json are of an earlier end: the run was resumed from step 40." in page
    assert read_json(RUN_DIR / "summary.json")["policy_version"] == 50, "as `penstock export` reads it"
    write_summary(RUN_DIR, replace(summary, status="completed"))
    assert read_run(RUN_DIR).summary["status"] == "completed"


def test_a_command_line_that_was_changed_since_then_wins(
    typed: Callable[..., RunConfig], trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    set_keys(Running(typed()), f"total_steps={LATER}", "checkpoint.keep_every=7")
    stop_at(300)
    assert resume.train(typed("total_steps=350")) == 0
    said = f"total_steps=350, as on the command line, which was changed since `penstock set total_steps={LATER}`\n"
    assert said in capsys.readouterr().out
    assert [(config.total_steps, config.checkpoint.keep_every) for config in trained] == [(350, 7)]
    # From then on it is the one that counts, and `penstock set` changes that.
    set_keys(Running(trained[0]), "total_steps=380")
    assert resume.train(typed("total_steps=350")) == 0
    assert trained[-1].total_steps == 380
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.lr=1\.0: the run began with"):
        resume.train(typed("total_steps=350", "trainer.optimizer.lr=1.0"))


def test_paths_are_written_as_they_were_typed_though_those_of_the_run_are_absolute(
    typed: Callable[..., RunConfig], trained: list[RunConfig]
) -> None:
    """As they are on a joined cluster."""
    run = Running(with_absolute_paths(typed()))
    set_keys(run, "checkpoint.keep=4")
    assert Path(str(run.config.model.path)).is_absolute(), "the run goes on with its own"
    assert run.config.checkpoint.keep == 4
    assert read_saved_config(RUN_DIR)["model"]["path"] == "policy"
    stop_at(100)
    assert resume.train(typed()) == 0, "no other key counts as changed"


def test_a_full_disk_is_told_and_the_same_command_can_be_given_again(
    typed: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Running(typed())

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved_config, "write_text_atomically", fail)
        with pytest.raises(PenstockError) as told:
            set_keys(run, f"total_steps={LATER}")
    assert f"total_steps {STEPS} -> {LATER}, from step {TRAINED + 1} on; but it could not be written" in str(told.value)
    assert "No space left on device" in str(told.value)
    assert set_keys(run, f"total_steps={LATER}") == (f"total_steps {STEPS} -> {LATER}, from step {TRAINED + 1} on")
    assert read_saved_config(RUN_DIR)["total_steps"] == LATER
    assert (set_keys(run, f"total_steps={LATER}")).startswith("nothing changes")


def test_after_the_last_step_the_command_that_trains_on_is_told(typed: Callable[..., RunConfig]) -> None:
    run = Running(typed(), STEPS, has_trained=True)
    with pytest.raises(
        PenstockError, match=rf"no step after {STEPS}, .* penstock resume runs/made total_steps={LATER}"
    ):
        set_keys(run, f"total_steps={LATER}")
    with pytest.raises(PenstockError, match=rf"take over checkpoint\.keep=4.* total_steps={2 * STEPS}"):
        set_keys(run, "checkpoint.keep=4")
    assert read_saved_config(RUN_DIR)["total_steps"] == STEPS


async def test_a_run_has_trained_once_its_loop_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it evaluates and copies its checkpoint, which may take long."""
    found: list[tuple[str, bool]] = []
    for name in ("evaluate_first", "maybe_checkpoint", "evaluate_last"):
        does = getattr(Run, name)

        async def observed(run: Run, name: str = name, does: Any = does) -> None:
            found.append((name, run.has_trained))
            await does(run)

        monkeypatch.setattr(Run, name, observed)
    await controller.train(run_of(set(), tmp_path, []))
    assert dict(found) == {"evaluate_first": False, "maybe_checkpoint": False, "evaluate_last": True}
