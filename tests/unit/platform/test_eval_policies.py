"""Which policy `penstock eval` measures, by whose configuration, and where the results go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.platform.checks.load import compose_config
from penstock.platform.cli import eval as eval_command
from penstock.platform.cli.eval import Measurement, load_measurement, measure, policies_in
from penstock.platform.cli.main import app
from penstock.platform.config.schema import RunConfig
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.small_run import small_run_overrides

RUN = "runs/made"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run with checkpoints of steps 4 and 8 and the policy of step 8, of the smallest model."""
    monkeypatch.chdir(tmp_path)
    own = ("evaluation.num_tasks=7", "evaluation.answers_per_task=2", "env.args.digits=2")
    run_dir = prepare_run_dir(compose_config(small_run_overrides(tmp_path, "made", character_tokenizer(), *own)))
    saved = CheckpointFolder(run_dir)
    saved.prepare()
    for version in (4, 8):
        manifest: dict[str, Any] = {
            "version": version,
            "incarnation": 0,
            "trainer_files": [],
            "spooled": {},
            "files": [],
            "run": {},
        }
        saved.commit(saved.unfinished(version), FlowSnapshot({}, (), ()), manifest)
    small_run_overrides(run_dir, "made", character_tokenizer())  # writes its policy
    (run_dir / "summary.json").write_text(json.dumps({"policy_version": 8}))
    before = files(run_dir)
    yield run_dir
    assert files(run_dir) == before, "the run stays as it is"


def load(policy: str | None, *overrides: str, **options: Any) -> Measurement:
    return load_measurement(policy, overrides, **options)


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["eval", *words], env={"COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


def test_a_run_is_measured_by_its_own_configuration_with_overrides(run_dir: Path) -> None:
    found = load(RUN, "evaluation.num_tasks=5")
    config = found.loaded.config
    assert (found.policy, found.step, found.checkpoint) == (f"{RUN}, step 8", 8, None)
    assert config.model.path == str(run_dir.resolve() / "policy")
    assert (config.evaluation.num_tasks, config.evaluation.answers_per_task, config.env.args["digits"]) == (5, 2, 2)
    assert found.folder == Path("runs/evaluations/made-step_8").absolute()
    assert config.run_dir == str(found.folder), "what it writes is not in the run"


def test_the_policy_of_a_checkpoint_is_written_where_all_nodes_see_it_and_removed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, measured = load(RUN, step=4), []

    def write(config: RunConfig, checkpoint: Path, target: Path) -> None:
        target.mkdir()

    def run_eval(config: RunConfig, policy: str, step: int | None, folder: Path) -> int:
        measured.append(Path(str(config.model.path)))
        assert measured[0].is_dir()
        assert measured[0].is_relative_to(folder)
        return 0

    monkeypatch.setattr(eval_command, "export_policy", write)
    monkeypatch.setattr(eval_command, "run_eval", run_eval)
    assert measure(found) == 0
    assert len(measured) == 1
    assert not found.folder.exists(), "it has no results"


@pytest.mark.parametrize("by", ["option", "path"])
def test_a_checkpoint_of_a_run_is_named_by_its_step_or_its_folder(run_dir: Path, by: str) -> None:
    found = load(RUN, step=4) if by == "option" else load(f"{RUN}/checkpoints/step_4")
    assert found.step == 4
    assert found.checkpoint is not None
    assert found.checkpoint.path == run_dir.resolve() / "checkpoints" / "step_4"
    assert found.folder.name == "made-step_4"


def test_the_best_step_of_a_run_can_be_named(run_dir: Path) -> None:
    assert "has no best.json" in refused(RUN, "--best")
    (run_dir / "best.json").write_text('{"step": 4, "accuracy": 0.9, "reward_mean": 0.95}')
    assert load(RUN, best=True).step == 4
    (run_dir / "best.json").unlink()


def test_results_never_replace_others(run_dir: Path) -> None:
    Path("runs/evaluations/made-step_8").mkdir(parents=True)
    assert load(RUN).folder.name == "made-step_8-2"
    Path("there").mkdir()
    assert "--to there: it exists" in refused(RUN, "--to", "there")
    assert load(RUN, to=Path("new")).folder == Path("new").absolute()


def test_a_run_that_wrote_a_policy_without_steps_is_measured_as_it_is(run_dir: Path) -> None:
    """As `penstock sft` does."""
    config = compose_config(["experiment=arithmetic_sft", "rollout/engine=torch", "run_dir=runs/warm"], command="sft")
    other = prepare_run_dir(config)
    small_run_overrides(other, "made", character_tokenizer())
    (other / "checkpoints" / "step_5.tmp").mkdir(parents=True)  # one that was never complete
    found = load("runs/warm", dry_run=True)
    assert (found.policy, found.step, found.checkpoint) == ("runs/warm", None, None)
    assert found.loaded.config.model.path == str(other.resolve() / "policy")
    assert not found.loaded.config.model.from_scratch


def test_a_folder_takes_the_place_of_the_path_of_the_model(run_dir: Path) -> None:
    words = small_run_overrides(Path("other one"), "made", character_tokenizer())
    found = load("other one/policy", *(word for word in words if not word.startswith(("model.path=", "name="))))
    assert found.loaded.config.model.path == "other one/policy"
    assert found.folder.name == "other one-policy"


@pytest.mark.parametrize(("here", "policy"), [("policy", "."), ("policy/sub", "..")])
def test_the_results_of_a_path_without_a_name_are_in_a_folder_of_its_own(here: str, policy: str, run_dir: Path) -> None:
    words = small_run_overrides(Path("other"), "made", character_tokenizer())
    Path("other/policy/sub").mkdir()
    with chdir(Path("other") / here):
        found = load(policy, *(word for word in words if not word.startswith(("model.path=", "name="))))
        assert found.folder == Path("runs/evaluations/policy").absolute()


@pytest.mark.parametrize("name", ["a=b", "a,b", "123"])
def test_a_policy_may_have_a_name_that_an_override_cannot(name: str, run_dir: Path) -> None:
    words = small_run_overrides(Path("other"), "made", character_tokenizer())
    Path("other/policy").rename(name)
    policies, overrides = policies_in([name, *(word for word in words if not word.startswith("model.path="))])
    assert policies == [name]
    assert load(name, *overrides).loaded.config.model.path == name


def test_a_text_that_is_no_path_is_an_override() -> None:
    assert policies_in([f"env.args.system={'long ' * 100}"])[0] == []


def test_a_name_on_the_hub_takes_its_place_too(run_dir: Path) -> None:
    """It is not downloaded by a dry run, and what is not here is said."""
    result = CliRunner().invoke(
        app, ["eval", "org/model", "experiment=arithmetic", "--dry-run"], env={"COLUMNS": "400"}
    )
    assert "model.path=org/model" in result.output
    assert "org/model" not in refused("experiment=arithmetic", "model.path=nowhere")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/mad/e"], "runs/mad/e: there is no such path. Give the directory of a run"),
        (["policy/..", "experiment=arithmetic"], "holds neither a run (config.yaml) nor a model (config.json)"),
        (["policy"], "experiment: none chosen"),
        (["policy", "experiment=arithmetic", "--step", "4"], "--step: only a run has steps, and policy is none"),
        ([RUN, "model.path=policy"], f"{RUN} and model.path= name two policies"),
        ([RUN, "--step", "5"], "no complete checkpoint of step 5; found steps [4, 8]"),
        ([f"{RUN}/checkpoints/step_4", "--step", "4"], "both say which step"),
        ([RUN, "evaluation.num_task=3"], "Did you mean"),
        ([RUN, "rollout/engine=torch"], "the configuration of a run takes single keys, KEY=VALUE"),
        ([RUN, "evaluation.num_tasks=0"], "`penstock eval` only answers those"),
        ([RUN, "policy", RUN], "3 policies"),
        ([RUN, RUN, "--step", "4"], "Of two, name a checkpoint: RUN/checkpoints/step_N"),
    ],
)
def test_what_cannot_be_measured_is_refused(run_dir: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["eval", *words], env={"COLUMNS": "400"})
    assert result.exit_code in (1, 2), result.output
    assert message in result.output
    assert not Path("runs/evaluations").exists()


def test_the_dry_run_of_two_policies_shows_both(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["eval", RUN, f"{RUN}/checkpoints/step_4", "--dry-run"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert result.output.count("dry run: nothing was started.") == 2
    assert not Path("runs/evaluations").exists()


@pytest.mark.parametrize("policy", [None, RUN])
def test_a_typed_run_dir_has_no_effect_and_is_said(policy: str | None, run_dir: Path) -> None:
    words = [] if policy else small_run_overrides(Path(), "made", character_tokenizer())
    said = "run_dir has no effect with `penstock eval`, whose results are in"
    assert not any(said in told for told in load(policy, *words).loaded.warnings)
    found = load(policy, *words, "run_dir=out")
    assert f"{said} {found.folder}. Use --to out." in found.loaded.warnings


@pytest.mark.parametrize("policy", [None, RUN, "policy"])
def test_a_typed_name_is_that_of_the_folder_of_the_results(
    policy: str | None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small_run_overrides(Path(), "made", character_tokenizer())
    words = [word for word in words if not word.startswith("model.path=" if policy else "name=")]
    here = Path.cwd()
    assert load(policy, *([] if policy == RUN else words), 'name="1e-6"').folder == here / "runs/evaluations/1e-6"


def test_two_policies_with_different_rewards_are_refused_before_one_is_measured(run_dir: Path, tmp_path: Path) -> None:
    words = small_run_overrides(tmp_path, "other", character_tokenizer(), "dataflow.pass_reward=0.5")
    other = prepare_run_dir(compose_config(words))
    small_run_overrides(other, "other", character_tokenizer())
    result = CliRunner().invoke(app, ["eval", RUN, "runs/other"], env={"COLUMNS": "400"})
    assert result.exit_code == 1, result.output
    assert "pass_reward differs, 1.0 and 0.5" in result.output
    assert not Path("runs/evaluations").exists()


def test_policies_are_the_words_that_are_no_overrides() -> None:
    words = ["runs/a", "evaluation.num_tasks=3", "runs/b", "+x.y=1", "~env.streams"]
    assert policies_in(words) == (["runs/a", "runs/b"], ["evaluation.num_tasks=3", "+x.y=1", "~env.streams"])
