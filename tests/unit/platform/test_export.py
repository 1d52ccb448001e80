"""What `penstock export` takes, where it writes, and what the model card says."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from penstock.platform.checks.load import compose_config
from penstock.platform.cli import export
from penstock.platform.cli.export import model_card
from penstock.platform.cli.main import app
from penstock.platform.cluster.actor_factory import trainer_spec
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import byte_tokenizer, load_codec
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.checkpoint import VALUE, write_snapshot
from penstock.trainer.models.tiny_policy import create_policy
from tests.chat_tokenizers import chat_tokenizer

STEP_40, STEP_60 = {"from": "step_40"}, {"from": "step_60"}
"""The config.json of a policy that was written from a checkpoint."""
SUMMARY = {"eval_before": 0.4, "eval_after": 0.85, "policy_version": 60, "version": "0.1.0"}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with checkpoints of steps 40 and 60, and the policy of step 60."""
    monkeypatch.chdir(tmp_path)
    run_dir = prepare_run_dir(compose_config(["experiment=arithmetic", "name=made"]))
    saved = CheckpointFolder(run_dir)
    saved.prepare()
    for version in (40, 60):
        manifest = {"version": version, "incarnation": 0, "trainer_files": [], "spooled": {}, "files": [], "run": {}}
        saved.commit(saved.unfinished(version), FlowSnapshot({}, (), ()), manifest)
    byte_tokenizer().save_pretrained(run_dir / "policy")
    (run_dir / "policy" / "config.json").write_text("{}")
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY))

    def export_policy(_config: object, checkpoint: Path, target: Path) -> None:
        byte_tokenizer().save_pretrained(target)
        (target / "config.json").write_text(json.dumps({"from": checkpoint.name}))

    monkeypatch.setattr(export, "export_policy", export_policy)
    return run_dir


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["export", *words], env={"COLUMNS": "400"})
    return f"{result.exit_code} {result.output}{result.stderr}"


@pytest.mark.parametrize(
    ("saved_version", "step", "source"),
    [(60, None, {}), (60, 60, {}), (60, 40, STEP_40), (40, None, STEP_60), (None, None, STEP_60)],
    ids=["saved", "saved_by_number", "checkpoint", "killed_after_a_resume", "killed"],
)
def test_the_newest_policy_is_written_or_that_of_a_step(
    run_dir: Path, saved_version: int | None, step: int | None, source: dict[str, str]
) -> None:
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY | {"policy_version": saved_version}))
    said = run(str(run_dir), "--to", "out", *([] if step is None else ["--step", str(step)]))
    version = step or (60 if source else saved_version)
    assert said == f"0 policy of step {version} written to out\n"
    assert json.loads(Path("out/config.json").read_text()) == source
    assert f"\n# made, step {version}\n" in Path("out/README.md").read_text()


@pytest.mark.parametrize("target", ["out[final]", "a[/b]", "c:smile:"])
def test_a_folder_is_named_with_its_brackets_and_colons(run_dir: Path, target: str) -> None:
    assert run(str(run_dir), "--to", target) == f"0 policy of step 60 written to {target}\n"
    assert Path(target, "config.json").exists()


def test_the_tokens_that_ended_the_answers_are_named_for_other_programs(run_dir: Path) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.eos_token = "<|eot_id|>"
    tokenizer.save_pretrained(run_dir / "policy")
    (run_dir / "policy" / "generation_config.json").write_text('{"temperature": 0.7}')
    assert run(str(run_dir), "--to", "out").startswith("0 ")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"])
    exported = json.loads(Path("out/generation_config.json").read_text())
    assert exported == {"temperature": 0.7, "eos_token_id": sorted(ends)}
    assert load_codec(Path("out")).named_ends == tuple(sorted(ends))
    assert run("runs/made", "--to", "again").startswith("0 ")
    assert json.loads((run_dir / "policy" / "generation_config.json").read_text()) == {"temperature": 0.7}


def test_the_policy_of_the_best_evaluation_is_written(run_dir: Path) -> None:
    assert "--best: " in (refused := run(str(run_dir), "--to", "out", "--best"))
    assert refused.startswith("2 ")
    assert "evaluation.keep_best=true writes it" in refused
    (run_dir / "best.json").write_text('{"step": 40, "accuracy": 0.9, "reward_mean": 0.95}')
    assert "--best --step 60: the two name different policies" in run(
        str(run_dir), "--to", "out", "--best", "--step", "60"
    )
    assert run(str(run_dir), "--to", "out", "--best") == "0 policy of step 40 written to out\n"
    assert json.loads(Path("out/config.json").read_text()) == STEP_40
    card = Path("out/README.md").read_text()
    assert "| held-out accuracy | 0.400 before, 0.900 after |" in card
    assert "| held-out reward | not measured before, 0.950 after |" in card


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run_dir: Path) -> None:
    Path("there").mkdir()
    assert run(str(run_dir), "--to", "there").startswith("2 ")
    assert "--to there: it exists" in run(str(run_dir), "--to", "there")
    assert "no complete checkpoint of step 7; found steps [40, 60]" in run(str(run_dir), "--to", "out", "--step", "7")
    assert "holds no config.yaml" in run("there", "--to", "out")
    warm = prepare_run_dir(compose_config(["experiment=arithmetic_sft", "name=warm"], command="sft"))
    (warm / "policy").mkdir()
    (warm / "policy" / "config.json").write_text("{}")
    assert "its policy has no step, and is a model folder already: " in run(str(warm), "--to", "out")
    assert not Path("out").exists()
    assert list(Path("there").iterdir()) == []


def test_the_card_names_a_base_model_on_the_hub_and_no_path_of_this_machine(tmp_path: Path) -> None:
    local = compose_config(["experiment=arithmetic", f"model.path={tmp_path}"])
    card = model_card(local, SUMMARY, {"torch": "2.13.0"}, 60)
    assert str(tmp_path) not in card
    assert "base_model" not in card
    assert "| held-out accuracy | 0.400 before, 0.850 after |" in card
    assert "held-out" not in model_card(local, SUMMARY, {}, 40), "measured with another policy"
    graded = SUMMARY | {"eval_before": None, "eval_reward_before": None, "eval_reward_after": 0.5}
    card = model_card(local, graded, {}, 60)
    assert "| held-out accuracy | not measured before, 0.850 after |" in card
    assert "| held-out reward | not measured before, 0.500 after |" in card
    model = local.model.model_copy(update={"path": "Qwen/Qwen3-0.6B"})
    assert "\nbase_model: Qwen/Qwen3-0.6B\n" in model_card(local.model_copy(update={"model": model}), {}, {}, 40)


def test_the_hub_gets_the_whole_folder_in_a_private_repository(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def record(name: str) -> Any:
        real = inspect.signature(getattr(huggingface_hub.HfApi, name))

        def call(*arguments: Any, **named: Any) -> None:
            real.bind(None, *arguments, **named)  # the library takes these
            files = sorted(path.name for path in Path(named["folder_path"]).iterdir()) if "folder_path" in named else []
            calls.append((name, named | {"files": files}))

        return call

    hub = SimpleNamespace(create_repo=record("create_repo"), upload_folder=record("upload_folder"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    assert "uploaded to https://huggingface.co/me/made (private" in run(str(run_dir), "--to", "hub:me/made")
    (created, of_repository), (uploaded, of_upload) = calls
    assert (created, uploaded) == ("create_repo", "upload_folder")
    assert of_repository["private"]
    assert of_upload["files"] == sorted({"README.md", *(path.name for path in (run_dir / "policy").iterdir())})
    assert of_upload["repo_id"] == "me/made"


def test_without_the_hub_the_message_says_what_gives_the_right(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise ConnectionError("401 Unauthorized")

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(create_repo=refuse))
    assert "--to hub:me/made: `hf auth login` gives the right to write: ConnectionError: 401" in run(
        str(run_dir), "--to", "hub:me/made"
    )


@pytest.mark.parametrize("adapters", [[], ["trainer=lora"]], ids=["weights", "adapters"])
def test_a_checkpoint_is_exported_whatever_trained_it(adapters: list[str], tmp_path: Path) -> None:
    """bfloat16 and rows over four ranks, of which the one process that exports has neither."""
    settings = ["model.dtype=bfloat16", "trainer.num_ranks=4", "trainer.zero_stage=2", "model.max_context_tokens=128"]
    rows = ["trainer.sequence_parallel_size=4", "trainer.max_tokens_per_micro_batch=32"]
    config = compose_config(["experiment=text", *adapters, *settings, *rows, f"model.path={tmp_path / 'start'}"])
    create_policy(config.model, byte_tokenizer(), str(tmp_path / "start"), seed=0)
    spec = trainer_spec(config)
    as_one = {"backend": "torch", "num_ranks": 1, "sequence_parallel_size": 1, "zero_stage": 0}
    trainer = build_trainer(
        replace(
            spec,
            model=spec.model.model_copy(update={"dtype": "float32"}),
            trainer=spec.trainer.model_copy(update=as_one | {"max_tokens_per_micro_batch": 128}),
        )
    )
    for fragment in trainer.backend.fragments():
        fragment.values[VALUE].add_(0.01 * torch.randn_like(fragment.values[VALUE]))
    write_snapshot(trainer.snapshot(3), tmp_path / "checkpoint", 0)
    save_policy(trainer, str(tmp_path / "trained"), spec.model_path)
    trainer.close()
    export.export_policy(config, tmp_path / "checkpoint", tmp_path / "exported")
    trained, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "exported"))
    assert trained.keys() == exported.keys()
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    of_weights = 4e-4 if adapters else 0.0  # weights below 0.1 are rounded before adapters are added, then the sum is
    for name, weight in trained.items():
        torch.testing.assert_close(exported[name].float(), weight, rtol=2**-8, atol=of_weights)
