"""`penstock set`: keys that change while a run trains, and what is left of that when it ends or is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from penstock.dataflow.errors import PenstockError
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.branch import branch
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run import resume, training
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.control import request
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary
from tests.in_process import in_process
from tests.small_run import small_run_overrides

CUT, STEPS, LATER = 3, 5, 7
REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"
OF_RUN = [
    "dataflow.batch_groups=2",
    "dataflow.max_staleness=0",
    "rollout.engine.deterministic=true",
    "rollout.engine.max_num_seqs=4",
    "reward.fn=own:letters",
    "model.max_context_tokens=64",
    "trainer.optimizer.lr=1e-3",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    f"total_steps={STEPS}",
]
Client = Callable[[Path], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    (folder / "own.py").write_text(REWARD)
    return folder


def train(folder: Path, name: str, client: Client, *more: str, kill_at: int | None = None) -> Path:
    """A run in which `client` runs after the cut, before the next step begins."""
    run_dir = folder / "runs" / name
    checkpoint = Run.maybe_checkpoint

    async def maybe_checkpoint(run: Run) -> None:
        await checkpoint(run)
        await run.checkpointer.written()
        if run.version == CUT:
            await asyncio.to_thread(client, run_dir)
        if run.version == kill_at:
            raise KeyboardInterrupt

    with in_process(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "maybe_checkpoint", maybe_checkpoint)
        config = compose_config(list(small_run_overrides(folder, name, character_tokenizer(), *OF_RUN, *more)))
        if kill_at is None:
            assert asyncio.run(training._train(config, prepare_run_dir(config))) == 0
        else:
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(training._train(config, prepare_run_dir(config)))
    return run_dir


def set_keys(run_dir: Path, *words: str) -> str:
    return request(run_dir, "set", list(words), print)


def logged(run_dir: Path, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.metrics[name]) for one in read_metrics(run_dir) if name in one.metrics]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "policy" / "model.safetensors")


@pytest.mark.full
def test_a_run_takes_over_keys_and_a_branch_from_there_is_bit_equal_to_it(folder: Path) -> None:
    said: list[str] = []

    def client(run_dir: Path) -> None:
        said.append(set_keys(run_dir, "trainer.optimizer.lr=3e-3", f"total_steps={LATER}", "checkpoint.keep=2"))

    run_dir = train(folder, "changed", client)
    assert said == [
        f"checkpoint.keep 9 -> 2, total_steps {STEPS} -> {LATER}, trainer.optimizer.lr 0.001 -> 0.003, "
        f"from step {CUT + 1} on"
    ]
    rates = dict(logged(run_dir, "loss/lr"))
    assert [rates[step] for step in range(1, LATER + 1)] == [1e-3] * CUT + [3e-3] * (LATER - CUT)
    assert CheckpointFolder(run_dir).versions() == [LATER - 1, LATER]
    assert (CUT, 3e-3) in logged(run_dir, "config/trainer.optimizer.lr")
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (saved["total_steps"], saved["trainer"]["optimizer"]["lr"]) == (LATER, 3e-3)
    history = [json.loads(line) for line in (run_dir / "config_history.jsonl").open()]
    assert [(row["key"], row["before"], row["now"], row["after_step"], row["by"]) for row in history] == [
        ("checkpoint.keep", 9, 2, CUT, "set"),
        ("total_steps", STEPS, LATER, CUT, "set"),
        ("trainer.optimizer.lr", 1e-3, 3e-3, CUT, "set"),
    ]
    assert "trainer.optimizer.lr 0.001 → 0.003 (set)" in (run_dir / "report.html").read_text()

    plain = train(folder, "plain", lambda _: None)
    with in_process(folder):
        assert branch(str(plain), "from_plain", ["trainer.optimizer.lr=3e-3", f"total_steps={LATER}"], CUT, None) == 0
    mine, other = weights(run_dir), weights(plain.parent / "from_plain")
    assert all(torch.equal(mine[name], other[name]) for name in other)


@pytest.mark.full
def test_a_killed_run_goes_on_with_what_was_set(folder: Path) -> None:
    run_dir = train(folder, "killed", lambda run_dir: print(set_keys(run_dir, "trainer.optimizer.lr=2e-3")), kill_at=4)
    with in_process(folder):
        assert resume.resume(run_dir, []) == 0
    rates = dict(logged(run_dir, "loss/lr"))
    assert [rates[step] for step in range(1, STEPS + 1)] == [1e-3] * CUT + [2e-3] * (STEPS - CUT)


@pytest.mark.full
def test_a_run_may_be_made_shorter_and_its_ledger_balances(folder: Path) -> None:
    run_dir = train(
        folder,
        "shorter",
        lambda run_dir: print(set_keys(run_dir, f"total_steps={CUT + 1}")),
        "dataflow.max_staleness=2",
        "total_steps=40",
    )
    summary = read_summary(run_dir)
    assert (summary["status"], summary["steps"]) == ("completed", CUT + 1)
    ledger = summary["ledger"]
    assert ledger["live"] == 0
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed"))


@pytest.mark.full
def test_what_a_run_cannot_take_over_is_refused_by_name_and_changes_nothing(folder: Path) -> None:
    refusals: list[str] = []

    def client(run_dir: Path) -> None:
        for words in (
            ["trainer.zero_stage=0"],
            ["trainer.optimizer.lr=-1"],
            ["trainer.optimizer.lr=2e-3", "model.path=elsewhere"],
            [f"total_steps={CUT}"],
            ["trainer.optimizer.decay_steps=2", "trainer.optimizer.warmup_steps=3"],
            ["total_steps"],
            [],
        ):
            with pytest.raises(PenstockError) as refused:
                set_keys(run_dir, *words)
            refusals.append(str(refused.value))
        assert set_keys(run_dir, "total_steps=5").startswith("nothing changes")

    run_dir = train(folder, "refusing", client)
    for refusal, said in zip(
        refusals,
        (
            "trainer.zero_stage: a run that goes on cannot take it over. It can: total_steps, ",
            "trainer.optimizer.lr",
            "model.path: a run that goes on",
            f"total_steps={CUT}: the run has trained {CUT} steps. The least is {CUT + 1}",
            "decay_steps=2",
            "total_steps",
            "at least one KEY=VALUE",
        ),
        strict=True,
    ):
        assert said in refusal
    assert not (run_dir / "config_history.jsonl").exists()
    assert {rate for _, rate in logged(run_dir, "loss/lr")} == {1e-3}
