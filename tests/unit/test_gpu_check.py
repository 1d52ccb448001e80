"""`make gpu-check` without a GPU: the commands of all steps are resolved, and the report tells how steps ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check

    return gpu_check


def test_every_step_is_resolved_without_a_gpu(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.print_plan(gpu_check.STEPS) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert all(f"\n{step.piece}  {step.name} " in f"\n{told}" for step in gpu_check.STEPS)
    assert told.endswith("dry run: nothing was started.\n")


def test_each_piece_fits_and_comes_in_the_order_of_what_it_tells(gpu_check: ModuleType) -> None:
    told = ["generate", "parity", "in_flight", "demo", "colocated", "sleep", "gsm8k", "gsm8k_qwen", "rollout"]
    told += ["trainer", "kernels", "speed"]
    assert [step.name for step in gpu_check.STEPS if step.name in told] == told
    pieces = [step.piece for step in gpu_check.STEPS]
    assert pieces == sorted(pieces)
    assert set(pieces) == set(range(1, gpu_check.NUM_PIECES + 1))
    for piece in set(pieces):
        steps = gpu_check.chosen_steps(piece, None, has_model=False)
        assert sum(step.limit_s for step in steps) <= gpu_check.PIECE_S, f"piece {piece}"


def test_steps_are_chosen_by_name_and_bring_the_model_they_need(gpu_check: ModuleType) -> None:
    def names(piece: int | None, chosen: list[str] | None, has_model: bool) -> list[str]:
        return [step.name for step in gpu_check.chosen_steps(piece, chosen, has_model=has_model)]

    assert names(None, ["parity", "machine"], has_model=True) == ["machine", "parity"]
    assert names(None, ["parity"], has_model=False) == ["model", "parity"]
    assert names(None, ["machine", "varlen"], has_model=False) == ["machine", "varlen"]
    assert names(None, None, has_model=False) == [step.name for step in gpu_check.STEPS]


def test_a_step_without_its_model_or_data_says_what_to_put_where(gpu_check: ModuleType, tmp_path: Path) -> None:
    step = gpu_check.Step("x", "", ("-c", ""), 10, needs=("runs/none/a", "runs/none/b"))
    gpu_check.INPUTS.update({"runs/none/a": "make it", "runs/none/b": "put it there"})
    outcome = gpu_check.run_step(step, tmp_path, gpus=1)
    assert outcome.status == "skipped"
    assert outcome.reason == "runs/none/a is missing: make it; runs/none/b is missing: put it there"
    assert all(path in gpu_check.INPUTS for one in gpu_check.STEPS for path in one.needs)


def test_a_cpu_runs_what_it_can_and_the_rest_says_why_not(gpu_check: ModuleType, tmp_path: Path) -> None:
    words = ("-c", "import os, sys; print(sys.argv[1:], repr(os.environ.get('CUDA_VISIBLE_DEVICES')))")
    both = gpu_check.Step("both", "", words, 60, on_gpu=("large",), on_cpu=("small",))
    no_cpu = gpu_check.Step("no_cpu", "", words, 60, on_cpu="it has no kernel")
    small, refused = gpu_check.run_steps([both, no_cpu], tmp_path, gpus=None)
    assert small.status == "passed"
    assert (tmp_path / "both.log").read_text() == "['small'] ''\n"
    gpu_check.run_step(both, tmp_path, gpus=1)
    assert (tmp_path / "both.log").read_text().startswith("['large'] ")
    assert "- on a CPU, with small models and few steps" in (tmp_path / "report.md").read_text()
    assert (refused.status, refused.reason) == ("skipped", "not on a CPU: it has no kernel")


def test_the_report_keeps_steps_of_earlier_calls(gpu_check: ModuleType, tmp_path: Path) -> None:
    def outcome(name: str, status: str, when: str):
        return gpu_check.Outcome(name, "x", status, when=when)

    first = [outcome("parity", "failed", "Monday"), outcome("machine", "passed", "Monday")]
    second = [outcome("parity", "passed", "Tuesday"), outcome("sleep", "failed", "Tuesday")]
    for outcomes in (first, second):
        gpu_check.write_report(outcomes, tmp_path, is_on_gpu=True)
    found = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert [(one["name"], one["status"], one["when"]) for one in found] == [
        ("machine", "passed", "Monday"),
        ("parity", "passed", "Tuesday"),
        ("sleep", "failed", "Tuesday"),
    ]
    assert "| parity | x | passed | 0 | Tuesday |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("benchmarks/gpu_probes.py", "partiy", "m"), "invalid choice: 'partiy'"),
        (("benchmarks/kernel_costs.py", "gpu", "--reslts", "m"), "unknown arguments: --reslts m"),
        (("benchmarks/none.py",), "benchmarks/none.py is no program that is known here"),
        (("PYTEST", "tests/unit/test_gpu_check.py"), "has no test that is marked"),
        (("TRAIN", "experiment=gsm8k_qwen_1gpu", "total_stps=20"), "Did you mean total_steps?"),
        (("TRAIN", "experiment=gsm8k_qwen_1gpu", "reward.fn=gpu_probes:share"), "gpu_probes:share is no function"),
        (("TRAIN", "experiment=gsm8k_qwen_1gpu", "rollout.num_engines=2"), "cluster.pools.gpu.count=1 is too small"),
    ],
)  # fmt: skip
def test_a_command_that_is_wrong_is_found(
    gpu_check: ModuleType, words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    known = {"PYTEST": gpu_check.PYTEST, "TRAIN": (*gpu_check.PENSTOCK, "train")}
    step = gpu_check.Step("planted", "", (*known.get(words[0], words[:1]), *words[1:]), 10)
    assert told in " ".join(gpu_check.problems(step, tmp_path))


def test_a_plan_that_takes_too_long_is_refused(gpu_check: ModuleType) -> None:
    step = gpu_check.Step("long", "", ("benchmarks/gpu_probes.py", "machine", "m"), gpu_check.PIECE_S + 1)
    assert gpu_check.print_plan([step]) == 1


FAILS = "def f():\n    raise ValueError('17 is not 18')\nprint('loading')\nf()"
HANGS = (
    "import pathlib, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "pathlib.Path('{out}/child').write_text(str(child.pid))\nprint('waiting', flush=True)\ntime.sleep(600)"
)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_one_report_tells_what_passed_failed_hung_and_was_skipped(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = gpu_check.Step
    steps = [
        step("good", "that it works", ("-c", "print('figures', '{\"speed\": 2.5}')"), 60),
        step("bad", "that it works", ("-c", FAILS), 60),
        step("slow", "that it ends", ("-c", HANGS), 6),
        step("tests", "the pytest form", ("-c", "print('SKIPPED [1] tests/x.py:3: there is no GPU\\n1 skipped')"), 60),
        step("two", "two GPUs", ("-c", "raise SystemExit(9)"), 60, num_gpus=2),
        step("gone", "a file", ("-m", "pytest", "tests/gpu/test_none.py"), 60),
        step("after", "that others go on", ("-c", "print('2 passed in 1 s')"), 60),
    ]
    gpu_check.run_steps(steps, tmp_path, gpus=1)
    report = json.loads((tmp_path / "report.json").read_text())
    found = {one["name"]: one for one in report["steps"]}
    assert {name: one["status"] for name, one in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "slow": "failed",
        "tests": "skipped",
        "two": "skipped",
        "gone": "skipped",
        "after": "passed",
    }
    assert found["good"]["figures"] == {"speed": 2.5}
    assert found["bad"]["reason"] == "ValueError: 17 is not 18"
    assert found["slow"]["reason"] == "over its time limit of 6 s\nwaiting"
    assert found["tests"]["reason"] == "there is no GPU"
    assert found["two"]["reason"] == "needs 2 GPUs, there are 1"
    assert found["gone"]["reason"] == "tests/gpu/test_none.py is not in this version"
    assert found["after"]["figures"] == {"tests_passed": 2}
    text = (tmp_path / "report.md").read_text()
    assert "| bad | that it works | failed |" in text
    assert "17 is not 18" in text
    assert "speed: 2.5" in text
    assert any(line.startswith("machine: ") for line in report["origin"])
    assert "2 passed, 2 failed, 3 skipped" in capsys.readouterr().out
    child, until = int((tmp_path / "child").read_text()), time.monotonic() + 30
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(child), "what a step has started ends with it"


def test_figures_of_a_run_are_medians_of_its_metrics(gpu_check: ModuleType, tmp_path: Path) -> None:
    lines = [
        {"step": step, "metrics": {"throughput/step_s": float(step), "reward/mean": step / 10}} for step in (1, 2, 9)
    ]
    lines += [{"step": step, "metrics": {"eval/accuracy": step / 100}} for step in (0, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = gpu_check.figures_of_run(tmp_path / "metrics.jsonl")
    assert figures == {
        "steps": 9,
        "throughput/step_s": 2.0,
        "reward_first": 0.1,
        "reward_last": 0.9,
        "accuracy_first": 0.0,
        "accuracy_last": 0.09,
    }
    catalog = (ROOT / "platform" / "metrics" / "catalog.yaml").read_text()
    assert all(f"\n{name}:" in catalog for name in gpu_check.RUN_METRICS)


def test_the_error_of_a_test_is_the_line_that_pytest_marks(gpu_check: ModuleType) -> None:
    log = "F\n____ test ____\n>   assert 1 == 2\nE   assert 1 == 2\nFAILED tests/gpu/x.py::test\n1 failed\n"
    assert gpu_check.error_lines(log) == "assert 1 == 2"
    assert gpu_check.error_lines("a\nerror: model.path=x does not exist.\n  line two\n").startswith("error: model.path")
    assert gpu_check.error_lines("") == ""


def test_the_error_of_an_engine_comes_before_those_that_follow_from_it(gpu_check: ModuleType) -> None:
    engine = "(EngineCore pid=7) ERROR 11-29 02:58:00 [core.py:1512] "
    log = f"{engine}  return f()\n{engine}RuntimeError: no kernel\nvllm.EngineDeadError: see above\n"
    assert gpu_check.error_lines(log) == "RuntimeError: no kernel\nvllm.EngineDeadError: see above"


def test_steps_find_what_the_documents_say(gpu_check: ModuleType) -> None:
    assert gpu_check.environment()["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "benchmarks")
    makefile = (ROOT / "Makefile").read_text()
    assert "\ngpu-check: setup" in makefile
    assert "benchmarks/gpu_check.py" in makefile
