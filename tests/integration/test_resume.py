"""A run that is killed and resumed is the run that was never killed: bit for bit where sampling is deterministic."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from typer.testing import CliRunner

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.dataflow.ledger import TERMINAL, GroupState, LedgerEvent
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.main import app
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run import resume, training
from penstock.platform.run.checkpoint import CHECKPOINTS, SPOOL, CheckpointFolder, choose_checkpoint
from penstock.platform.run.lifecycle import Stop
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary
from tests.in_process import in_process, train_in_process
from tests.ledger_logs import surviving
from tests.small_run import small_run_overrides
from tests.tiers import by_tier

STEPS = 20
NUM_EXPERTS = 4
OF_EXPORTS = ("saved", "of_checkpoint")
SMALL = ("model.max_context_tokens=64", "trainer.optimizer.lr=1e-3", "trainer.optimizer.warmup_steps=4")
REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"
OWN_REWARD = ("dataflow.batch_groups=2", "reward.fn=own:letters")
EVERY_STEP = ["checkpoint.every_steps=1", f"total_steps={STEPS}", *OWN_REWARD, *SMALL]
FRESH = ("dataflow.max_staleness=0", "rollout.engine.deterministic=true", "rollout.engine.max_num_seqs=4")
METRICS_OF_TIME = (
    "throughput/",
    "idle/",
    "memory/",
    "checkpoint/",
    "weights/",
    "trainer/",
    "flow/",
    "rank/",
    "engine/",
)


class KilledError(Exception):
    """Simulates the end of the driver's process."""


def kill_at(version: int, patch: pytest.MonkeyPatch) -> None:
    """End a run after it has published `version`, before its checkpoint."""
    checkpoint = Run.maybe_checkpoint

    async def maybe_checkpoint(run: Run) -> None:
        if run.version == version:
            raise KilledError
        await checkpoint(run)
        await asyncio.sleep(0.05)  # the writer, which is a thread, gets a turn
        if run.checkpointer.newest is None:  # however slow it is, there is one to resume from
            await run.checkpointer.written()

    patch.setattr(Run, "maybe_checkpoint", maybe_checkpoint)


def start_and_kill(folder: Path, overrides: Sequence[str], version: int) -> None:
    with in_process(folder), pytest.MonkeyPatch.context() as patch:
        kill_at(version, patch)
        config = compose_config(list(overrides))
        with pytest.raises(KilledError):
            asyncio.run(training._train(config, prepare_run_dir(config)))


def resume_in_process(folder: Path, run_dir: Path, *overrides: str, allows_changed: bool = False) -> None:
    with in_process(folder):
        assert resume.resume(run_dir, list(overrides), allows_changed=allows_changed) == 0


def learned(run_dir: Path) -> list[tuple[int, str, float]]:
    """Step, name and value of everything that was logged about what was sampled and learned."""
    return [
        (record.step, name, value)
        for record in read_metrics(run_dir)
        for name, value in record.metrics.items()
        if not name.startswith(METRICS_OF_TIME)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "own.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    train_in_process(folder, small_run_overrides(folder, "whole", character_tokenizer(), *FRESH, *EVERY_STEP))
    return folder / "runs" / "whole"


@pytest.fixture(scope="module")
def uninterrupted_mixture(folder: Path) -> Path:
    """Of a mixture of experts, whose routes are recorded and replayed."""
    overrides = small_run_overrides(
        folder, "mixture", character_tokenizer(), *FRESH, *EVERY_STEP, num_experts=NUM_EXPERTS
    )
    train_in_process(folder, overrides)
    return folder / "runs" / "mixture"


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(by_tier(2, full=5)))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(folder: Path, uninterrupted: Path, seed: int) -> None:
    kill_resume_and_compare(folder, uninterrupted, f"killed{seed}", seed)


@pytest.mark.full
def test_so_does_that_of_a_mixture_of_experts(folder: Path, uninterrupted_mixture: Path) -> None:
    kill_resume_and_compare(folder, uninterrupted_mixture, "killed_mixture", seed=0, num_experts=NUM_EXPERTS)
    shares = [value for _, name, value in learned(uninterrupted_mixture) if name == "routing/unknown_share"]
    assert shares == [0.0] * STEPS


def kill_resume_and_compare(folder: Path, uninterrupted: Path, name: str, seed: int, num_experts: int = 0) -> None:
    rng = random.Random(seed)
    overrides = small_run_overrides(folder, name, character_tokenizer(), *FRESH, *EVERY_STEP, num_experts=num_experts)
    run_dir = folder / "runs" / name
    start_and_kill(folder, overrides, version=rng.randint(2, STEPS - 1))
    newest = choose_checkpoint(run_dir)
    resume_in_process(folder, run_dir)
    assert (run_dir / CHECKPOINTS / f"step_{STEPS}").is_dir()
    assert newest.version < STEPS
    assert learned(run_dir) == learned(uninterrupted)
    policy, other = (load_file(path / "policy" / "model.safetensors") for path in (run_dir, uninterrupted))
    assert all(torch.equal(policy[key], other[key]) for key in other)
    assert max(value for _, name, value in learned(run_dir) if name == "loss/grad_norm") > 0, "it has learned something"
    summary, expected = read_summary(run_dir), read_summary(uninterrupted)
    assert summary["ledger"] == expected["ledger"]
    assert summary["tokens_trained"] == expected["tokens_trained"]


@pytest.mark.full
@pytest.mark.parametrize("num_experts", [0, NUM_EXPERTS])
def test_ready_and_open_groups_go_on_and_nothing_is_trained_twice(folder: Path, num_experts: int) -> None:
    name, of_run = f"stale{num_experts}", ("dataflow.max_staleness=3", *EVERY_STEP, "rollout.num_engines=2")
    overrides = small_run_overrides(folder, name, character_tokenizer(), *of_run, num_experts=num_experts)
    run_dir = folder / "runs" / name
    start_and_kill(folder, overrides, version=7)
    checkpoint = choose_checkpoint(run_dir)
    live = checkpoint.manifest["flow"]["core"]["groups"]
    assert live, "groups were sampled ahead"
    resume_in_process(folder, run_dir)
    ledger = read_summary(run_dir)["ledger"]
    assert ledger["trained"] == 2 * STEPS
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed"))
    assert ledger["dropped"] == 0, "what was live at the cut was restored"
    trained = [
        event.group_id
        for event in surviving(run_dir)
        if isinstance(event, LedgerEvent) and event.state is GroupState.TRAINED
    ]
    assert len(trained) == len(set(trained)) == 2 * STEPS, "the ledger on disk tells the same"
    steps = [record.step for record in read_metrics(run_dir) if "reward/mean" in record.metrics]
    assert steps == list(range(1, STEPS + 1)), "no step is logged twice"
    unknown = [value for _, name, value in learned(run_dir) if name == "routing/unknown_share"]
    assert unknown == [0.0] * (STEPS if num_experts else 0), "routes are kept, too"
    assert {path.name for path in (run_dir / SPOOL).iterdir()} <= {
        Path(name).name
        for version in CheckpointFolder(run_dir).versions()
        for name in choose_checkpoint(run_dir, version).manifest["spooled"].values()
    }, "spooled groups that no checkpoint names are removed"


@pytest.mark.full
def test_a_run_that_is_stopped_loses_nothing_and_its_ledger_has_one_end_for_each_group(folder: Path) -> None:
    overrides = small_run_overrides(
        folder, "stopped", character_tokenizer(), "dataflow.max_staleness=2", *EVERY_STEP[1:], "checkpoint.keep=9"
    )
    run_dir = folder / "runs" / "stopped"
    stop = Stop()
    publish = Run.publish

    async def publish_and_stop(run: Run, version: int) -> None:
        await publish(run, version)
        if version == 6:
            assert stop.ends_itself, "at the next cut, since this step is complete"
            stop.begin("SIGTERM", signal.SIGTERM)

    with in_process(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "publish", publish_and_stop)
        config = compose_config(list(overrides))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(training._train(config, prepare_run_dir(config), stop=stop))
    checkpoint = choose_checkpoint(run_dir)
    assert checkpoint.version == 6, "at the next cut, not at the next interval"
    assert (run_dir / "policy" / "model.safetensors").exists()
    live = {group["group_id"] for group in checkpoint.manifest["flow"]["core"]["groups"]}
    assert live
    resume_in_process(folder, run_dir)
    ends = [
        (event.group_id, event.state)
        for event in surviving(run_dir)
        if isinstance(event, LedgerEvent) and event.state in TERMINAL
    ]
    assert len({group_id for group_id, _ in ends}) == len(ends) == read_summary(run_dir)["ledger"]["admitted"]
    assert {state for group_id, state in ends if group_id in live} == {GroupState.TRAINED}


@pytest.mark.full
def test_going_back_behind_a_later_checkpoint_has_to_be_allowed(folder: Path) -> None:
    run_dir = folder / "runs" / "stopped"
    first, *_, last = CheckpointFolder(run_dir).versions()
    with in_process(folder):
        with pytest.raises(ConfigError, match=rf"--step {first}: the checkpoints of the later steps \[.*{last}\]"):
            resume.resume(run_dir, [], step=first)
        assert resume.resume(run_dir, [f"total_steps={first + 1}"], step=first, allows_changed=True) == 0
    assert CheckpointFolder(run_dir).versions() == [first, first + 1]


@pytest.mark.full
def test_the_same_command_started_again_continues_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = small_run_overrides(
        folder, "again", character_tokenizer(), *FRESH, *EVERY_STEP[2:], "total_steps=4", "checkpoint.every_steps=1"
    )
    start_and_kill(folder, overrides, version=3)
    with in_process(folder):
        config = compose_config([*overrides, "resume=auto"])
        assert resume.train(config) == 0
        assert "from the checkpoint of step 2; the run had reached step 3" in capsys.readouterr().out
        assert read_summary(folder / "runs" / "again")["steps"] == 4
        assert resume.train(config) == 0
        assert "nothing is left" in capsys.readouterr().out
        with pytest.raises(ConfigError, match=r"seed=1: the run began with 0"):
            resume.train(compose_config([*overrides, "resume=auto", "seed=1", "total_steps=9"]))


def test_what_cannot_be_resumed_says_why(folder: Path, uninterrupted: Path) -> None:
    with in_process(folder):
        with pytest.raises(ConfigError, match=r"total_steps=20: the checkpoint is of step 20"):
            resume.resume(uninterrupted, [])
        with pytest.raises(ConfigError, match=r"algorithm.loss.clip_high=0.5: the run began with 0\.2"):
            resume.resume(uninterrupted, ["total_steps=30", "algorithm.loss.clip_high=0.5"])
        with pytest.raises(ConfigError, match=r"rollout\.sampling\.top_k=5: the run began with 0, .* with top_k=0"):
            resume.resume(uninterrupted, ["total_steps=30", "rollout.sampling.top_k=5"], allows_changed=True)
        with pytest.raises(ConfigError, match=r"trainer\.zero_stag"):
            resume.resume(uninterrupted, ["total_steps=30", "trainer.zero_stag=3"])
        with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
            resume.resume(folder, [])
        with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 3; found steps \[\d+, 20\]"):
            resume.resume(uninterrupted, [], step=3)


def test_the_exported_policy_of_the_last_checkpoint_is_the_one_that_the_run_has_saved(
    folder: Path, uninterrupted: Path
) -> None:
    with in_process(folder):
        result = CliRunner().invoke(app, ["export", str(uninterrupted), "--to", "saved"])
        assert "policy of step 20 written to saved" in result.output
        summary = uninterrupted / "summary.json"
        summary.rename(summary.with_suffix(".away"))  # as after kill -9: only the checkpoint is left
        try:
            result = CliRunner().invoke(app, ["export", str(uninterrupted), "--to", "of_checkpoint", "--step", "20"])
        finally:
            summary.with_suffix(".away").rename(summary)
        assert "policy of step 20 written to of_checkpoint" in result.output
    saved, exported = ({path.name: path.read_bytes() for path in (folder / one).iterdir()} for one in OF_EXPORTS)
    assert saved.keys() == exported.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    weights = "model.safetensors"
    assert load(saved[weights]).keys() == load(exported[weights]).keys()
    assert all(torch.equal(tensor, load(exported[weights])[name]) for name, tensor in load(saved[weights]).items())
    assert b"| steps | 20 of 20 |" in exported["README.md"]


@pytest.mark.full
def test_a_longer_run_continues_a_completed_one(folder: Path, uninterrupted: Path) -> None:
    del uninterrupted
    overrides = small_run_overrides(folder, "longer", character_tokenizer(), *FRESH, *EVERY_STEP[2:], "total_steps=2")
    train_in_process(folder, [*overrides, "checkpoint.every_steps=2"])
    run_dir = folder / "runs" / "longer"
    resume_in_process(folder, run_dir, "total_steps=4")
    assert read_summary(run_dir)["steps"] == 4
