"""A run that branches from a checkpoint of another one: bit for bit that run, had it been changed there."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.dataflow.errors import ConfigError
from penstock.platform.cli import branch as branches
from penstock.platform.cli.branch import PARTS, begin, branch
from penstock.platform.metrics.run_files import START_PARTNER, START_POLICY
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run import resume
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.saved_config import changed_config, differences, read_saved_config, write_changed
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import read_summary
from tests.in_process import in_process, train_in_process
from tests.small_run import small_run_overrides
from tests.tiny_policy import tiny_shape

STEPS, CUT, LATER = 6, 4, 8
REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"
OF_RUN = [
    "dataflow.batch_groups=2",
    "reward.fn=own:letters",
    "model.max_context_tokens=64",
    "trainer.optimizer.lr=1e-3",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    f"total_steps={STEPS}",
]
FRESH = ["dataflow.max_staleness=0", "rollout.engine.deterministic=true", "rollout.engine.max_num_seqs=4"]
CHANGE = ["trainer.optimizer.lr=3e-3", f"total_steps={LATER}"]


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "policy" / "model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branch")
    (folder / "own.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def parent(folder: Path) -> Path:
    train_in_process(folder, small_run_overrides(folder, "parent", character_tokenizer(), *OF_RUN, *FRESH))
    return folder / "runs" / "parent"


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Path:
    """A run that samples ahead, so that its checkpoints hold live groups."""
    overrides = small_run_overrides(
        folder, "ahead", character_tokenizer(), *OF_RUN, "dataflow.max_staleness=3", "rollout.num_engines=2"
    )
    train_in_process(folder, overrides)
    return folder / "runs" / "ahead"


def test_a_branch_equals_the_run_that_was_changed_there_and_leaves_its_parent_as_it_was(
    folder: Path, parent: Path
) -> None:
    before = contents(parent)
    with in_process(folder):
        assert branch(str(parent), "branched", CHANGE, CUT, None) == 0
    assert contents(parent) == before
    branched = parent.parent / "branched"
    with in_process(folder):
        assert resume.resume(parent, CHANGE, CUT, allows_changed=True) == 0
    assert are_equal(weights(branched), weights(parent))
    rewards = [
        [
            (record.step, record.metrics["reward/mean"])
            for record in read_metrics(run)
            if "reward/mean" in record.metrics
        ]
        for run in (branched, parent)
    ]
    assert rewards[0] == rewards[1]
    assert [step for step, _ in rewards[0]] == list(range(1, LATER + 1)), "with the steps before it"
    summary = read_summary(branched)
    assert summary["branched_from"] == {"run": str(parent), "step": CUT, "restored": "groups"}
    assert summary["name"] == "branched"
    assert f"{parent}, step {CUT}, with its groups" in (branched / "report.html").read_text()


def test_a_branch_has_the_configuration_of_its_step_and_compares_only_what_measures_the_same(
    folder: Path, parent: Path, tmp_path: Path
) -> None:
    """RUN was changed after that step, as by `penstock set`."""
    run_dir = tmp_path / "changed"
    shutil.copytree(parent, run_dir)
    saved = read_saved_config(run_dir)
    config = changed_config(saved, ["trainer.optimizer.lr=5e-3", "total_steps=9"], run_dir)
    write_changed(run_dir, config, CUT + 1, differences(saved, config.model_dump(mode="json")), by="set")
    more = ["total_steps=7"]
    with in_process(folder):
        same = begin(str(run_dir), "same", more, CUT, None)
        other = begin(str(run_dir), "other", [*more, "evaluation.num_tasks=2", "reward.timeout_s=9"], CUT, None)
    assert same.config.trainer.optimizer.lr == 1e-3
    assert any("trainer.optimizer.lr=0.001, as at step 4; the run was changed to 0.005" in one for one in same.told)
    assert not any("total_steps" in one for one in same.told)
    states = [one.start.manifest["run"] for one in (same, other)]
    assert [[one["step"] for one in state["evaluations"]] for state in states] == [[0], []]
    assert sum("measured something else" in one for one in other.told) == 1
    assert [one.config.model_dump(mode="json") for one in (same, other)] == [state["config"] for state in states]


def test_a_branch_of_the_weights_alone_goes_on_from_its_place_and_where_it_was_moved(
    folder: Path, parent: Path, tmp_path: Path
) -> None:
    place, new = tmp_path / "place", tmp_path / "new"
    with in_process(folder):
        again = [f"checkpoint.upload=file://{place}", "total_steps=2", "checkpoint.every_steps=1"]
        assert branch(str(parent), str(new), again, CUT, "weights") == 0
    new.rename(tmp_path / "moved")
    with in_process(folder):
        for source, name in ((f"file://{place}", "of_place"), (str(tmp_path / "moved"), "of_moved")):
            copied = begin(source, str(tmp_path / name), ["total_steps=3"], None, None)
            assert copied.config.model.path == str(copied.run_dir / START_POLICY)
            assert contents(copied.run_dir / START_POLICY) == contents(tmp_path / "moved" / START_POLICY)
        shutil.rmtree(place)
        shutil.rmtree(tmp_path / "moved")
        assert resume.resume(copied.run_dir, []) == 0
    assert read_summary(copied.run_dir)["steps"] == 3


def test_a_branch_of_the_weights_of_two_policies_has_both(folder: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    _, *overrides = small_run_overrides(tmp_path, "two", tokenizer, *OF_RUN)
    partner = ModelConfig(
        max_context_tokens=64, shape=tiny_shape(vocab_size=len(tokenizer), hidden_size=48, head_dim=16)
    )
    create_policy(partner, tokenizer, str(tmp_path / "other"), seed=1)
    (tmp_path / "own.py").write_text(REWARD)
    of_partner = ["partner.model.path=other", "partner.model.max_context_tokens=64", "total_steps=2"]
    train_in_process(tmp_path, ["experiment=arithmetic_two_policies", *overrides, *of_partner])
    with in_process(tmp_path):
        begun = begin("runs/two", "new", [], None, "weights")
    assert begun.config.partner is not None
    assert begun.config.partner.model.path == str(begun.run_dir / START_PARTNER)
    for name, saved in ((START_POLICY, "policy"), (START_PARTNER, "partner")):
        found, expected = (
            load_file(one / "model.safetensors") for one in (begun.run_dir / name, tmp_path / "runs/two" / saved)
        )
        assert are_equal(found, expected)


def test_a_branch_that_is_interrupted_leaves_nothing(
    folder: Path, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        assert (tmp_path / "new").is_dir()
        raise KeyboardInterrupt

    with in_process(folder):
        for name, part in (("export_policy", "weights"), ("copied", "groups")):
            monkeypatch.setattr(branches, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                begin(str(parent), str(tmp_path / "new"), ["total_steps=9"], CUT, part)
            assert not (tmp_path / "new").exists()


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_checkpoint_can_be_the_last_that_is_kept(folder: Path, ahead: Path, part: str) -> None:
    name, checkpoint = f"upto_{part}", CheckpointFolder(ahead).read(CUT)
    live = {group["task_id"] for group in checkpoint.manifest["flow"]["core"]["groups"]}
    assert live
    with in_process(folder):
        assert branch(str(ahead), name, [], CUT, part) == 0
    run_dir = ahead.parent / name
    summary = read_summary(run_dir)
    assert summary["status"] == "completed"
    assert summary["branched_from"]["restored"] == part
    ledger = summary["ledger"]
    assert ledger["trained"] == 2 * STEPS
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed"))
    num_dropped = summary["untrained"].get("dropped(rollback)", 0)
    assert num_dropped == (len(live) if part in ("optimizer", "data") else 0)
    steps = [record.step for record in read_metrics(run_dir) if "reward/mean" in record.metrics]
    assert steps == list(range(1, STEPS + 1))
    assert (run_dir / START_POLICY).is_dir() == (part == "weights")
    with in_process(folder):  # it is a run like any other
        assert resume.resume(run_dir, [f"total_steps={STEPS + 1}"]) == 0


def test_what_cannot_be_branched_says_why_and_writes_nothing(folder: Path, ahead: Path) -> None:
    runs = set(ahead.parent.iterdir())
    with in_process(folder):
        for overrides, step, restore, said in (
            ([], STEPS, None, rf"total_steps={STEPS}: the checkpoint is of step {STEPS}.*--as new total_steps="),
            (["trainer.lora.rank=2"], CUT, None, "add --restore weights"),
            (["model.path=elsewhere"], CUT, None, r"model\.path was"),
            (["trainer.optimiser.lr=1"], CUT, None, "optimi"),
            (["algorithm=gspo"], CUT, None, "."),
            ([], CUT, "all", "--restore all: there is no such part"),
        ):
            with pytest.raises(ConfigError, match=said):
                branch(str(ahead), "new", overrides, step, restore)
        with pytest.raises(ConfigError, match=r"--as ahead: .* exists"):
            branch(str(ahead), "ahead", [], CUT, None)
        with pytest.raises(ConfigError, match="name"):
            branch(str(ahead), "no name", [], CUT, None)
    assert set(ahead.parent.iterdir()) == runs
