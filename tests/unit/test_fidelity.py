"""`make fidelity`: the order of its cells, which of them run again, and the intervals of its table."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.answers import answered
from tests.model_folder import CONFIG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fidelity

    return fidelity


@pytest.fixture
def report(fidelity: ModuleType) -> ModuleType:
    import fidelity_report

    return fidelity_report


def settings_of(_cell: Any) -> list[str]:
    return ["today"]


def completed(report: ModuleType, cell: Any, accuracy: float = 0.9, **changes: Any) -> Any:
    figures = {"start_accuracy": 0.4, "accuracy": accuracy, "wall_s": 90.0, "steps_s": 60.0, "trained_groups": 1280}
    staleness = {"stale_token_share": 0.97, "mean_staleness": 5.5, "others_percent": 1.0}
    source = {"settings": ["today"], "policy": "p", "commit": "abc", "machine": "m", "versions": {"torch": "2"}}
    return report.Record(cell=cell, status="completed", **(figures | staleness | source | changes))


def test_the_seeds_of_the_first_tasks_come_before_other_tasks_and_each_seed_is_completed_first(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "FIRST", ("a", "b"))
    cells = fidelity.ordered_cells(["c", "b", "a"], [3, 4])
    blocks = [(cell.task, cell.seed) for cell in cells[::7]]
    assert blocks == [("b", 3), ("a", 3), ("b", 4), ("a", 4), ("c", 3), ("c", 4)]
    assert [(cell.max_staleness, cell.correction) for cell in cells[7:14]] == [
        (0, "none"),
        (2, "uncorrected"),
        (2, "decoupled"),
        (2, "TIS"),
        (8, "uncorrected"),
        (8, "decoupled"),
        (8, "TIS"),
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 42


def test_the_cells_of_a_seed_differ_only_in_staleness_and_correction(fidelity: ModuleType) -> None:
    from penstock.platform.checks.load import compose_config

    for task in fidelity.TASKS:
        shared, corrections = [], {}
        for cell in fidelity.ordered_cells([task], [3]):
            config = compose_config([*fidelity.settings_of(cell), "name=x", "model.path=p"]).model_dump(mode="json")
            assert config["dataflow"].pop("max_staleness") == cell.max_staleness
            corrections[cell.correction] = [
                name for name, value in config["algorithm"].pop("correction").items() if isinstance(value, dict)
            ]
            shared.append(config)
        assert all(config == shared[0] for config in shared)
        assert shared[0]["seed"] == 3
        assert corrections == {"none": [], "uncorrected": [], "decoupled": ["decoupled"], "TIS": ["tis_token"]}


@pytest.mark.full
def test_the_commands_of_every_task_are_accepted(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from penstock.platform.checks.load import load_config

    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    policy = tmp_path / "policy"
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(policy)
    character_tokenizer().save_pretrained(policy)
    own = ["name=x", f"run_dir={tmp_path / 'run'}"]
    for name, task in fidelity.TASKS.items():
        (cell, *_) = fidelity.ordered_cells([name], [0])
        load_config("sft", [*task.warm_start, *own], dry_run=True)
        load_config("train", [*fidelity.settings_of(cell), f"model.path={policy}", *own], dry_run=True)


def test_a_cell_is_skipped_only_with_the_same_settings_and_policy(fidelity: ModuleType, report: ModuleType) -> None:
    cell, other = report.Cell("arithmetic", 2, "TIS", 0), report.Cell("arithmetic", 2, "TIS", 1)
    settings = fidelity.settings_of(cell)
    done = [completed(report, cell, settings=settings)]
    assert fidelity.is_finished(cell, "p", settings, done, retry=False)
    assert not fidelity.is_finished(other, "p", fidelity.settings_of(other), done, retry=False)
    assert not fidelity.is_finished(cell, "p", [*settings, "total_steps=41"], done, retry=False)
    assert not fidelity.is_finished(cell, "another policy", settings, done, retry=False)


def test_a_seed_that_is_complete_with_another_policy_stays(fidelity: ModuleType, report: ModuleType) -> None:
    cells = fidelity.ordered_cells(["arithmetic"], [0])
    done = [completed(report, cell, settings=fidelity.settings_of(cell)) for cell in cells]
    for cell in cells:
        settings = fidelity.settings_of(cell)
        assert fidelity.is_finished(cell, "another policy", settings, done, retry=False)
        assert not fidelity.is_finished(cell, "another policy", settings, done[:-1], retry=False)


def test_a_failed_cell_runs_again_only_on_request_and_its_record_is_replaced(
    fidelity: ModuleType, report: ModuleType
) -> None:
    cell = report.Cell("arithmetic", 8, "decoupled", 0)
    settings = fidelity.settings_of(cell)
    failed = report.Record(
        cell=cell, status="failed", settings=settings, policy="p", commit="abc", machine="m", reason="out of memory"
    )
    assert fidelity.is_finished(cell, "p", settings, [failed], retry=False)
    assert not fidelity.is_finished(cell, "p", settings, [failed], retry=True)
    now = completed(report, cell, settings=settings)
    earlier = completed(report, cell, settings=["other"])
    assert fidelity.with_record([failed, earlier], now) == [earlier, now]


def test_records_are_read_as_they_were_written(
    fidelity: ModuleType, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "RESULTS", tmp_path / "fidelity.json")
    assert fidelity.read_records() == []
    cell = report.Cell("arithmetic", 0, "none", 3)
    failed = report.Record(
        cell=cell, status="failed", settings=["x=1"], policy="p", commit="abc", machine="m", reason="killed"
    )
    records = [completed(report, cell), failed]
    fidelity.write_records(records)
    assert fidelity.read_records() == records
    assert [row["status"] for row in json.loads(fidelity.RESULTS.read_text())] == ["completed", "failed"]


def test_an_interrupted_comparison_continues_and_a_complete_one_starts_nothing(
    fidelity: ModuleType, report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "ROOT", tmp_path)
    monkeypatch.setattr(fidelity, "RESULTS", tmp_path / "fidelity.json")
    monkeypatch.setattr(report, "TABLE", tmp_path / "fidelity.md")
    monkeypatch.setattr(report, "IMAGE", tmp_path / "images" / "fidelity.svg")
    monkeypatch.setenv("PYTHONPATH", "")
    started: list[str] = []
    interrupts = ["arithmetic-eta2-TIS-seed0"]

    def run_cell(cell: Any, _policy: Path, checksum: str, _timeout_s: float) -> Any:
        started.append(cell.name)
        if cell.name in interrupts:
            interrupts.remove(cell.name)
            raise KeyboardInterrupt
        return completed(report, cell, settings=fidelity.settings_of(cell), policy=checksum)

    def warm_start(task: str, _timeout_s: float) -> tuple[Path, str]:
        started.append(task)
        return tmp_path, "p"

    monkeypatch.setattr(fidelity, "run_cell", run_cell)
    monkeypatch.setattr(fidelity, "warm_start", warm_start)
    monkeypatch.setattr("sys.argv", ["fidelity.py", "--tasks", "arithmetic", "--seeds", "0:1"])
    names = [cell.name for cell in fidelity.ordered_cells(["arithmetic"], [0])]
    with pytest.raises(KeyboardInterrupt):
        fidelity.main()
    assert started == ["arithmetic", *names[:4]]
    started.clear()
    fidelity.main()
    assert started == ["arithmetic", *names[3:]]
    started.clear()
    fidelity.main()
    assert started == []
    assert len(fidelity.read_records()) == 7


def test_figures_are_those_of_the_summary_and_of_the_steps(fidelity: ModuleType) -> None:
    summary = {
        "eval_before": 0.5,
        "eval_after": 0.75,
        "wall_s": 100.04,
        "share_tokens_stale": 0.5,
        "trained_groups": 64,
    }
    steps = [{"throughput/step_s": 1.25, "staleness/mean_versions": 1.0}, {"eval/accuracy": 0.75},
             {"throughput/step_s": 1.5, "staleness/mean_versions": 2.0}]  # fmt: skip
    assert fidelity.measured(summary, steps) == {
        "start_accuracy": 0.5, "accuracy": 0.75, "wall_s": 100.0, "steps_s": 2.8, "stale_token_share": 0.5,
        "mean_staleness": 1.5, "trained_groups": 64,
    }  # fmt: skip


def test_quantiles_are_those_of_students_distribution(report: ModuleType) -> None:
    """By numerical integration of its density: 97.5 % lie below the tabulated value."""
    from math import gamma, pi, sqrt

    for freedom, quantile in enumerate(report.T_975, start=1):
        x = np.linspace(0.0, quantile, 200_001, dtype=np.float64)
        scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
        density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert 0.5 + np.trapezoid(density, x) == pytest.approx(0.975, abs=2e-6)


def test_an_interval_is_the_mean_and_students_t_times_the_standard_error(report: ModuleType) -> None:
    values = [0.91, 0.93, 0.88, 0.95, 0.92]
    estimate = report.Estimate.of(values)
    assert estimate.center == pytest.approx(0.918)
    assert estimate.half_width == pytest.approx(2.776445 * np.std(values, ddof=1) / np.sqrt(5), rel=1e-4)
    assert estimate.text() == "0.918 ± 0.032"
    assert report.Estimate.of([0.9]).text() == "0.900"


@pytest.mark.parametrize(
    ("center", "half_width", "verdict"),
    [
        (-0.005, 0.014, "yes"),
        (0.05, 0.06, "yes"),
        (-0.005, 0.016, "open"),
        (-0.03, 0.02, "open"),
        (-0.05, 0.02, "no"),
        (-0.5, None, "open"),
    ],
)
def test_a_loss_is_small_or_not_only_if_its_whole_interval_says_so(
    report: ModuleType, center: float, half_width: float | None, verdict: str
) -> None:
    assert report.Estimate(center, half_width).loss_is_small == verdict


def test_a_row_takes_the_difference_within_seeds_and_leaves_out_seeds_without_a_baseline(report: ModuleType) -> None:
    cells = [report.Cell("sums", 0, "none", seed) for seed in (0, 1)]
    stale = [report.Cell("sums", 8, "TIS", seed) for seed in (0, 1, 2)]
    records = [completed(report, cell, accuracy) for cell, accuracy in zip(cells, (0.90, 0.80), strict=True)]
    records += [
        completed(report, cell, accuracy, steps_s=45.0)
        for cell, accuracy in zip(stale, (0.89, 0.78, 0.10), strict=True)
    ]
    synchronous, asynchronous = report.rows(report.comparable(records, settings_of))
    assert synchronous[:7] == ["sums", "0", "–", "2", "0.850 ± 0.635", "–", "–"]
    # Accuracy: mean 0.59, s = sqrt((0.3² + 0.19² + 0.49²) / 2) = 0.4279, 4.3027 * s / sqrt(3) = 1.0630.
    # Differences -0.01 and -0.02: mean -0.015, s = 0.00707, 12.7062 * s / sqrt(2) = 0.0635.
    assert asynchronous == [
        "sums", "8", "TIS", "3", "0.590 ± 1.063", "-0.015 ± 0.064", "open", "97%", "5.50", "45", "0.75",
    ]  # fmt: skip


def test_cells_of_a_seed_from_different_policies_are_not_compared(report: ModuleType) -> None:
    cells = [report.Cell("sums", *arm, 0) for arm in report.ARMS]
    mixed = [completed(report, cells[0], 0.1, policy="old")]
    mixed += [completed(report, cell, 0.9, policy="new") for cell in cells[:2]]
    mixed += [completed(report, cells[2], 0.5, settings=["yesterday"])]
    (arms,) = report.comparable(mixed, settings_of).values()
    runs = [run for seeds in arms.values() for run in seeds.values()]
    assert [(run.policy, run.accuracy) for run in runs] == [("new", 0.9), ("new", 0.9)]


def test_the_page_says_where_the_figures_are_from_and_what_failed(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "TABLE", tmp_path / "fidelity.md")
    monkeypatch.setattr(report, "IMAGE", tmp_path / "images" / "fidelity.svg")
    cell = report.Cell("sums", 0, "none", 0)
    source = {"settings": ["today"], "policy": "p", "commit": "abc", "machine": "m"}
    failed = report.Record(
        cell=report.Cell("sums", 2, "TIS", 0), status="failed", reason="ended with exit code 1", **source
    )
    report.write_report([failed], settings_of)
    assert not report.TABLE.exists()
    report.write_report([completed(report, cell), failed, completed(report, cell, settings=["old"])], settings_of)
    text = report.TABLE.read_text()
    assert "| sums | 0 | – | 1 | 0.900 |" in text
    for line in (
        "commit: abc",
        "machine: m",
        "failed: sums-eta2-TIS-seed0: ended with exit code 1",
        "1 runs with other",
    ):
        assert re.search(rf"^- {line}", text, re.MULTILINE), line
    assert report.IMAGE.stat().st_size > 1000


def played(fidelity: ModuleType, actions: list[str]) -> tuple[list[str], float]:
    """The prompts that a policy with these actions sees for 120+340 then + 600, and its reward."""
    from fidelity_tasks import RunningTotal

    task = Task(TaskId("t"), "120+340=", {"last": 600, "total": 1060})
    environment = RunningTotal(0).environment()
    reply = environment.reset(task)
    prompts = [reply.content]
    for turn, text in enumerate(actions):
        reply = environment.step(Action(text, turn=turn))
        if isinstance(reply, Done):
            break
        prompts.append(reply.content)
    return prompts, reply.reward


@pytest.mark.parametrize(
    ("actions", "prompts", "reward"),
    [
        (["0+0+0=0;460", "1060"], ["120+340=", "460+600="], 1.0),
        (["460", "1061"], ["120+340=", "460+600="], 0.5),
        (["461", "1061"], ["120+340=", "461+600="], 0.0),
        (["461", "1060"], ["120+340=", "461+600="], 0.5),
        (["46", "1060"], ["120+340="], 0.0),
    ],
)
def test_the_running_total_asks_for_the_second_sum_with_the_policys_own_first_one(
    fidelity: ModuleType, actions: list[str], prompts: list[str], reward: float
) -> None:
    assert played(fidelity, actions) == (prompts, reward)


def test_gold_actions_of_the_running_total_get_full_reward(fidelity: ModuleType) -> None:
    from fidelity_tasks import RunningTotal

    source = RunningTotal(0)
    for task in islice(source.train(), 200):
        environment = source.environment()
        environment.reset(task)
        *_, last = [environment.step(Action(text, turn=turn)) for turn, text in enumerate(source.gold_actions(task))]
        assert isinstance(last, Done)
        assert last.reward == 1.0


def numbers_only(fidelity: ModuleType, task: str) -> Any:
    """The source of a task of reasoning-gym, with the settings that its runs have."""
    from fidelity_tasks import NumbersOnly

    args = next(word for word in fidelity.TASKS[task].training if word.startswith("env.args="))
    return NumbersOnly(0, **yaml.safe_load(args.removeprefix("env.args=")))


@pytest.mark.parametrize("task", ["number_sorting", "gcd"])
def test_rows_of_reasoning_gym_are_asked_in_numbers_and_judged_by_its_verifier(fidelity: ModuleType, task: str) -> None:
    from fidelity_tasks import verified_by_reasoning_gym

    source, tokenizer = numbers_only(fidelity, task), character_tokenizer()
    held_out = source.held_out(100)
    trained = {task.prompt for task in islice(source.train(), 500)}
    for asked in held_out:
        gold = source.gold_response(asked)
        assert asked.prompt not in trained
        assert tokenizer.decode(tokenizer.encode(asked.prompt + gold)) == asked.prompt + gold
        assert len(gold) < 72
        assert verified_by_reasoning_gym(answered(gold), **asked.fields) == 1.0
        assert verified_by_reasoning_gym(answered(f"{gold};0"), **asked.fields) == 0.0
        assert verified_by_reasoning_gym(answered(gold, finish_reason="length"), **asked.fields) == 0.0


def test_gold_answers_of_reasoning_gyms_rows_show_their_steps(fidelity: ModuleType) -> None:
    from fidelity_tasks import gcd_answer, gcd_question, sorting_answer, sorting_question

    row = {"numbers": [58, 98]}
    assert (gcd_question(row), gcd_answer(row)) == ("58,98=", "98-58=40;58-40=18;40-36=4;18-16=2;4-4=0;2")
    row = {"original_numbers": ["56.0", "9.0", "75.0"], "sorted_numbers": ["75.0", "56.0", "9.0"]}
    assert sorting_question(row | {"direction": "descending"}) == "56,9,75>"
    assert sorting_question(row | {"direction": "ascending"}) == "56,9,75<"
    assert sorting_answer(row) == "75,56,9"
