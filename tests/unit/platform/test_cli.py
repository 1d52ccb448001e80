"""The command: exit codes, one readable error, a dry run that starts nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.dataflow.errors import TrainingError
from penstock.platform.checks.load import compose_config
from penstock.platform.cli import main as cli
from penstock.platform.cluster import hardware
from penstock.platform.metrics import atomic_file
from penstock.platform.run import offline_training as learning_run
from penstock.platform.run.lifecycle import Interrupted
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.trainer.algorithms.catalog import entries


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(cli.app, list(words))


def loaded_with(module: str, heavy: set[str]) -> str:
    """Which of the `heavy` modules a new process has loaded after importing `module`."""
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout.strip()


def test_help_is_light():
    heavy = {"torch", "ray", "vllm", "hydra", "transformers", "pydantic"}
    assert loaded_with("penstock.platform.cli.main", heavy) == "[]"


def test_every_command_has_help(invoke):
    names = typer.main.get_command(cli.app).commands
    assert {name: invoke(name, "--help").exit_code for name in names} == dict.fromkeys(names, 0)


@pytest.mark.full
def test_a_simulation_loads_no_models():
    assert loaded_with("penstock.platform.simulator.simulation", {"vllm", "transformers", "deepspeed"}) == "[]"


def test_a_config_error_is_readable_and_exits_2(invoke):
    result = invoke("train", "experiment=arithmetic", "dataflow.max_stalness=1", "total_steps=abc")
    assert result.exit_code == 2
    assert "3 problems" in result.stderr
    assert "Did you mean dataflow.max_staleness?" in result.stderr
    assert "total_steps" in result.stderr
    assert "penstock sft experiment=arithmetic_sft" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("experiment", ["gsm8k_qwen_1gpu", "math_qwen_8gpu"])
def test_gpu_experiments_dry_run_on_any_machine(invoke, experiment, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    result = invoke("train", f"experiment={experiment}", "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"name: {experiment}" in result.output
    for row in ("driver", "trainer", "engine", "reward"):
        assert row in result.output
    assert "no NVIDIA driver" in result.output
    assert "hf download Qwen/" in result.output
    assert "nothing was started" in result.output
    assert not Path("runs").exists()


def test_the_warm_start_dry_runs_without_warning(invoke):
    result = invoke("sft", "experiment=arithmetic_sft", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "warning" not in result.output
    assert "engine" not in result.output.split("placement")[1]


def test_a_run_of_the_gpu_experiment_without_driver_exits_2(invoke, monkeypatch):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    result = invoke("train", "experiment=gsm8k_qwen_1gpu")
    assert result.exit_code == 2
    assert "no NVIDIA driver" in result.stderr


def raising(error: BaseException):
    def start(_):
        raise error

    return start


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TrainingError("loss is not finite"), 1, "loss is not finite"),
        (Interrupted(2), 130, ""),
        (Interrupted(15), 143, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_run_becomes_an_exit_code(invoke, monkeypatch, error, code, words):
    monkeypatch.setattr(learning_run, "run_sft", raising(error))
    result = invoke("sft", "experiment=arithmetic_sft")
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_foreign_error_is_one_line_with_the_path_of_its_traceback(invoke, monkeypatch):
    def start(config):
        Path(config.run_dir).mkdir(parents=True)
        (Path(config.run_dir) / "error.txt").write_text("Traceback ...")
        raise RuntimeError("remote traceback\nValueError: no luck")

    monkeypatch.setattr(learning_run, "run_sft", start)
    result = invoke("sft", "experiment=arithmetic_sft")
    assert result.exit_code == 1
    assert "RuntimeError: ValueError: no luck" in result.stderr
    assert "error.txt" in result.stderr


def test_an_error_whose_traceback_cannot_be_written_is_shown_whole(invoke, monkeypatch):
    def start(config):
        Path(config.run_dir).mkdir(parents=True)
        monkeypatch.setattr(atomic_file.os, "fsync", raising(OSError(28, "No space left on device")))
        raise RuntimeError("no luck")

    monkeypatch.setattr(learning_run, "run_sft", start)
    result = invoke("sft", "experiment=arithmetic_sft")
    assert repr(result.exception) == "RuntimeError('no luck')"


def test_a_broken_pipe_of_a_run_is_no_silent_exit(invoke, monkeypatch):
    def start(config):
        Path(config.run_dir).mkdir(parents=True)
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(learning_run, "run_sft", start)
    result = invoke("sft", "experiment=arithmetic_sft")
    assert result.exit_code == 1
    assert "BrokenPipeError: [Errno 32] Broken pipe" in result.stderr
    (trace,) = Path("runs").glob("*/error.txt")
    assert "Traceback" in trace.read_text()


def test_a_report_of_no_steps_says_that_there_are_none(invoke):
    result = invoke("report", "runs/none")
    assert result.exit_code == 2
    assert "runs/none" in result.stderr


@pytest.mark.parametrize("folder", ["runs/a[b]", "runs/c:x:", "[/d]"])
def test_a_run_is_named_with_its_brackets_and_colons(invoke, folder):
    prepare_run_dir(compose_config(["experiment=arithmetic", f"run_dir='{folder}'"]))
    assert f"{folder} has no checkpoints" in invoke("checkpoints", folder).output


def test_algorithms_are_listed_from_the_catalog(invoke):
    result = invoke("algorithms")
    assert result.exit_code == 0, result.output
    for entry in entries():
        assert f" {entry.name} " in result.output
        assert Path(entry.file).name in result.output
    corrections = invoke("algorithms", "--kind", "correction").output
    assert "weight clamp(w, lo, C)" in corrections
    assert "ppo_clip" not in corrections
    assert "arXiv 2507.18071" in invoke("algorithms", "--kind", "loss").output


def test_an_unknown_kind_of_algorithm_is_refused_with_the_kinds(invoke):
    result = invoke("algorithms", "--kind", "corection")
    assert result.exit_code == 2
    assert "Did you mean 'correction'?" in result.stderr
