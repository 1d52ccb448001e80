"""The commands of docs/guides/day-two.md, in its order, on the smallest run."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.platform.checks.load import compose_config
from penstock.platform.cli import population
from penstock.platform.cli.main import app
from penstock.platform.run import training
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.arch.test_documents import commands
from tests.command_line import read_summary, run_cli
from tests.in_process import in_process
from tests.small_run import small_run_overrides

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "day-two.md"
REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"
MY_TRACKER = """
import json

class MyTracker:
    def __init__(self, run_dir, run_name, config, project):
        self.file = open(f"{run_dir}/{project}.jsonl", "a")

    def log(self, step, metrics):
        self.file.write(json.dumps([step, sorted(metrics)]) + "\\n")

    def log_summary(self, summary):
        self.file.write(json.dumps([summary["steps"], [summary["status"]]]) + "\\n")

    def close(self):
        self.file.close()
"""
OF_RUN = [
    "dataflow.batch_groups=2",
    "reward.fn=own:letters",
    "model.max_context_tokens=64",
    "trainer.optimizer.lr=1e-5",
]
OF_LONG = ["checkpoint.every_steps=20", "checkpoint.keep=9", "total_steps=60"]
REACHED = 45


class KilledError(Exception):
    """Simulates the end of the driver's process."""


def small(name: str, folder: Path, *more: str) -> list[str]:
    return list(small_run_overrides(folder, name, character_tokenizer(), *OF_RUN, *more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `runs/long`, which was killed after its step 45."""
    folder = tmp_path_factory.mktemp("day-two")
    (folder / "own.py").write_text(REWARD)
    checkpoint = Run.maybe_checkpoint

    async def maybe_checkpoint(run: Run) -> None:
        await checkpoint(run)
        await run.checkpointer.written()
        if run.version == REACHED:
            raise KilledError

    with in_process(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "maybe_checkpoint", maybe_checkpoint)
        config = compose_config(small("long", folder, *OF_LONG))
        with pytest.raises(KilledError):
            asyncio.run(training._train(config, prepare_run_dir(config)))
    return folder


def of_section(title: str) -> Iterator[list[str]]:
    """The commands of a section."""
    section = GUIDE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = list(commands(section.replace("```text", "```bash")))  # text: what needs more than this repository
    assert found, title
    yield from found


def invoke(words: Sequence[str]) -> str:
    assert words[0] == "penstock", words
    done = CliRunner().invoke(app, list(words[1:]))
    assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
    return done.output


def status(run_dir: Path) -> tuple[str, int]:
    summary = read_summary(run_dir)
    return summary["status"], summary["steps"]


def test_branch_a_run(folder: Path) -> None:
    with in_process(folder):
        for words in of_section("Branch a run"):
            invoke(words)
    runs = folder / "runs"
    assert [status(runs / name) for name in ("warmer", "shorter", "weights-only")] == [("completed", 60)] * 3
    assert [read_summary(runs / name)["branched_from"]["step"] for name in ("warmer", "shorter")] == [40, 40]


def test_change_a_run_while_it_trains(folder: Path) -> None:
    said: list[str] = []
    checkpoint = Run.maybe_checkpoint

    async def maybe_checkpoint(run: Run) -> None:
        await checkpoint(run)
        if run.version == 50:
            said.extend([await asyncio.to_thread(invoke, one) for one in of_section("Change a run while it trains")])

    with in_process(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "maybe_checkpoint", maybe_checkpoint)
        invoke(["penstock", "resume", "runs/long"])
    assert "trainer.optimizer.lr 1e-05 -> 5e-06, from step 51 on" in said[0]
    assert "checkpoint.keep 9 -> 4" in said[1]
    assert status(folder / "runs" / "long") == ("completed", 400)


def test_keep_checkpoints_here_and_elsewhere(folder: Path) -> None:
    kept, copied, continued = of_section("Keep checkpoints, here and elsewhere")
    with in_process(folder):
        for words in (kept, copied):
            own = [word for word in words if "=" in word and not word.startswith("experiment=")]
            name = next(word for word in own if word.startswith("name=")).removeprefix("name=")
            own = [word.replace("s3://", f"file://{folder}/") for word in own]
            invoke(
                ["penstock", "train", *small(name, folder, *own[1:], "evaluation.every_steps=20", "total_steps=120")]
            )
        invoke([*(word.replace("s3://", f"file://{folder}/") for word in continued), "total_steps=130"])
    names = sorted(path.name for path in (folder / "runs" / "kept" / "checkpoints").iterdir())
    assert {"step_50", "step_100", "step_120"} <= set(names)
    assert status(folder / "runs" / "continued") == ("completed", 130)


def test_a_population_instead_of_a_grid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = of_section("A population instead of a grid")
    at = words.index("experiment=arithmetic")
    own = [word for word in small("", folder) if not word.startswith(("name=", "trainer.optimizer.lr="))]
    monkeypatch.setattr(population, "run_penstock", lambda words, *_: invoke(["penstock", *words]))
    with in_process(folder):
        invoke([*words[:at], *own, *words[at + 1 :], "--score", "eval/reward_mean"])
    table = (folder / "runs" / "population" / "population.md").read_text()
    assert table.count("\n| 100 | ") == 4


def test_evaluate_on_several_sets_measure_any_policy_compare_two(folder: Path) -> None:
    trained, *others = of_section("Evaluate on several sets, measure any policy, compare two")
    of_test = ["evaluation.every_steps=20", "evaluation.sets.long.num_tasks=2", *OF_LONG]
    with in_process(folder):
        own = [word for word in trained if word.startswith("evaluation.")]
        for name, seed in (("first", 0), ("second", 1)):
            invoke(["penstock", "train", *small(name, folder, *own, *of_test, f"trainer.optimizer.lr=1e-{5 + seed}")])
        invoke(["penstock", "export", "runs/first", "--to", "exported"])
    for words in others:
        own = [word for word in small("exported", folder) if not word.startswith("model.path=")]
        if "experiment=arithmetic" in words:
            words = [*words[:-1], *own]
        words = [word.replace("num_tasks=256", "num_tasks=2") for word in words]
        done = run_cli(*words[1:], cwd=folder)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    results = {path.name for path in (folder / "runs" / "evaluations").iterdir()}
    assert {"first-step_60", "second-step_60", "first-step_40", "exported"} <= results


@pytest.mark.parametrize("tracker", ["every_library", "my_own"])
def test_log_to_trackers(folder: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, every_library, my_own = of_section("Log to W&B, MLflow, Trackio or a tracker of yours")
    for name, value in (("TRACKIO_DIR", str(folder / "trackio")), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "offline")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if tracker == "every_library":
        for library in ("mlflow", "trackio"):
            pytest.importorskip(library, reason=f"the extra `{library}` is not installed")
    (folder / "my_module.py").write_text(MY_TRACKER)
    words = {"every_library": every_library, "my_own": my_own}[tracker]
    with in_process(folder):
        invoke([*words[:2], *small(tracker, folder, *words[3:], "total_steps=3")])
    run_dir = folder / "runs" / tracker
    if tracker == "my_own":
        *steps, last = [json.loads(line) for line in (run_dir / "rivers.jsonl").read_text().splitlines()]
        assert {step for step, _ in steps} == {0, 1, 2, 3}
        assert last == [3, ["completed"]]
    else:
        assert (run_dir / "metrics.jsonl").is_file()
        assert [(run_dir / name).is_file() for name in ("wandb_run_id", "mlflow_run_id", "trackio_run")] == [True] * 3
        assert list((folder / "trackio").iterdir())


def test_merge_policies(folder: Path) -> None:
    base = ["trainer.optimizer.lr=1e-4", "total_steps=3"]
    with in_process(folder):
        for name in ("base", "add", "subtract"):
            own = [word for word in small(name, folder, *base) if name == "base" or not word.startswith("model.path=")]
            invoke(["penstock", "train", *own, *(["model.path=runs/base/policy"] if name != "base" else [])])
        for words in of_section("Merge policies"):
            invoke(words)
    assert {(folder / name / "model.safetensors").is_file() for name in ("merged", "merged-ties")} == {True}


def test_ratios_and_idle_memory(folder: Path) -> None:
    with in_process(folder):
        for words in of_section("Ratios and idle memory"):
            assert words[-1] == "--dry-run"
            own = small("ratios", folder) if "experiment=arithmetic" in words else [words[2]]
            invoke([*words[:2], *own, *words[3:]])
