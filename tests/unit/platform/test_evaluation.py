"""Evaluations of one or several answers per task, answers that fail, and the answers that are stored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ids import PARTNER, TaskId
from penstock.dataflow.ports import Score
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.config.schema import EvaluationConfig
from penstock.platform.metrics.evaluation_table import MAX_ROWS_PER_SET, EvaluationTable
from penstock.platform.metrics.hub import undeclared
from penstock.platform.metrics.trajectory_table import read_trajectories
from penstock.platform.run.evaluation import (
    MAX_ATTEMPTS,
    Evaluation,
    Evaluator,
    SetScore,
    best_of,
    evaluation_from,
    majority_solves,
    num_since_best,
    pass_at_k,
)
from tests.answers import answered


class Runner:
    """Each answer is `<member>`; `requests` are the members and sampling parameters."""

    codec = SimpleNamespace(stop_token_ids=(1,))
    pool = SimpleNamespace(in_use=nullcontext)

    def __init__(self) -> None:
        self.requests: list[tuple[int, SamplingParams]] = []

    async def run(self, context: Any, member: int, sampling: SamplingParams) -> Trajectory:
        self.requests.append((member, sampling))
        return replace(answered(str(member)), trajectory_id=context.trajectory_id(member))


class Rewards:
    """The prompt of a task lists the rewards of its answers; `x` fails, `-` is no opinion, `1=a` is 1 for the answer a.
    The part `doubled` is twice the reward.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: Counter[str] = Counter()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        self.calls[trajectory.trajectory_id] += 1
        reward = str(task.prompt).split()[int(trajectory.response) % self.size]
        if reward == "x":
            raise TrajectoryError("reward", "the judge is down")
        if reward == "-":
            return Score(None)
        number, is_judged, answer = reward.partition("=")
        return Score(float(number), {"doubled": 2 * float(number)}, answer if is_judged else None)


def tasks_of(*prompts: str, name: str = "") -> list[Task]:
    return [Task(TaskId(f"t{index}"), prompt, evaluation_set=name) for index, prompt in enumerate(prompts)]


def evaluator(runner: Runner, size: int = 1, pass_reward: float = 1.0, **settings: Any) -> Evaluator:
    config = EvaluationConfig(answers_per_task=size, **settings)
    sampling = SamplingParams(8, 0.7, stop_token_ids=(1,), seed=5)
    return Evaluator(runner, Rewards(size), sampling, config, pass_reward)  # type: ignore[arg-type]


async def test_one_answer_per_task_is_greedy_and_has_no_pass_at_k() -> None:
    runner = Runner()
    found = await evaluator(runner).evaluate(3, tasks_of("1", "0.5"))
    assert (found.accuracy, found.reward_mean, found.num_tasks, found.pass_at) == (0.5, 0.75, 2, {})
    assert [sampling.temperature for _, sampling in runner.requests] == [0.0, 0.0]
    assert not any(name.startswith("eval/pass_at/") for name in found.metrics())


async def test_several_answers_are_sampled_each_with_its_own_seed_and_give_avg_and_pass_at_k() -> None:
    runner = Runner()
    found = await evaluator(runner, 6, temperature=0.5).evaluate(3, tasks_of("1 1 1 0 0 0", "0 0 0 0 0 0.5"))
    assert found.accuracy == 3 / 12, "avg@6"
    assert found.reward_mean == 3.5 / 12
    assert found.num_tasks == 2
    # Of the first task, 3 of the 15 pairs hold no solution, and none of the 15 fours.
    assert found.pass_at == pytest.approx({"2": (12 / 15) / 2, "4": 0.5, "6": 0.5})
    assert found.metrics()["eval/pass_at/4"] == 0.5
    assert undeclared(found.metrics()) == []
    assert sorted(member for member, _ in runner.requests) == list(range(12))
    assert {sampling.temperature for _, sampling in runner.requests} == {0.5}
    assert len({sampling.seed for _, sampling in runner.requests}) == 12
    assert {sampling.max_new_tokens for _, sampling in runner.requests} == {8}
    assert evaluation_from(json.loads(json.dumps(asdict(found)))) == found


async def test_every_evaluation_set_has_pass_at_k() -> None:
    tasks = [*tasks_of("1 0", name="easy"), *tasks_of("0 0", name="hard")]
    metrics = (await evaluator(Runner(), 2, temperature=1.0).evaluate(0, tasks)).metrics()
    assert (metrics["eval/pass_at/2"], metrics["eval/pass_at/2/easy"], metrics["eval/pass_at/2/hard"]) == (
        0.5,
        1.0,
        0.0,
    )
    assert undeclared(metrics) == []


async def test_an_answer_solves_its_task_from_pass_reward_on() -> None:
    found = await evaluator(Runner(), pass_reward=0.5).evaluate(0, tasks_of("0.5", "0.49"))
    assert found.accuracy == 0.5


async def test_a_part_of_the_reward_can_be_measured_instead_of_the_whole() -> None:
    found = await evaluator(Runner(), part="doubled").evaluate(0, tasks_of("0.5", "0.25", "0", "1"))
    assert (found.accuracy, found.reward_mean) == (0.5, (1.0 + 0.5 + 0.0 + 2.0) / 4)


async def test_a_part_that_the_reward_does_not_have_fails_the_evaluation_with_those_that_it_has() -> None:
    with pytest.raises(PenstockError, match=r"evaluation\.part=true: the reward of t/0 has no such part.*doubled\."):
        await evaluator(Runner(), part="true").evaluate(0, tasks_of("1"))


async def test_failed_answers_are_counted_with_their_reason_and_in_no_figure() -> None:
    found = await evaluator(Runner(), 2, temperature=1.0, max_failed_share=0.5).evaluate(
        3, [*tasks_of("1 x", "1 0", name="easy"), *tasks_of("x x", name="gone")]
    )
    assert (found.accuracy, found.num_tasks, found.num_unscorable) == (2 / 3, 2, 3)
    assert found.pass_at == {"2": 1.0}, "only the second task has two answers"
    assert found.failures == {"reward: the judge is down": 3}
    assert found.metrics()["eval/unscorable"] == 3
    assert set(found.sets) == {"easy"}


@pytest.mark.parametrize(("num_failed", "fails"), [(5, False), (6, True)])
async def test_an_evaluation_fails_beyond_the_tolerated_share(num_failed: int, fails: bool) -> None:
    tasks = tasks_of(*["x"] * num_failed, *["1"] * (100 - num_failed))
    if not fails:
        found = await evaluator(Runner()).evaluate(3, tasks)
        assert (found.accuracy, found.num_tasks, found.num_unscorable) == (1.0, 95, 5)
        return
    message = (
        r"6 of 100 answers could not be .*\.max_failed_share=0.05 tolerates fewer.* t\d: reward: the judge is down"
    )
    with pytest.raises(PenstockError, match=message):
        await evaluator(Runner()).evaluate(3, tasks)


async def test_answers_without_an_opinion_of_the_reward_are_counted_and_in_no_figure() -> None:
    found = await evaluator(Runner(), 2, temperature=0.5).evaluate(3, tasks_of("1 -", "- -", "0 0.5"))
    assert (found.num_tasks, found.num_abstained, found.num_unscorable) == (2, 3, 0)
    assert (found.accuracy, found.reward_mean, found.pass_at) == (1 / 3, 0.5, {"2": 0.0})
    assert found.metrics()["eval/abstained"] == 3
    assert not undeclared(found.metrics())
    assert evaluation_from(asdict(found)) == found
    with pytest.raises(PenstockError, match=r"none of the 4 answers has a reward.* and on 4 the reward had no opinion"):
        await evaluator(Runner(), 2, temperature=0.5).evaluate(3, tasks_of("- -", "- -"))


async def test_tasks_that_are_too_long_are_skipped_and_named_in_the_score() -> None:
    limited = evaluator(Runner())
    limited.limit = SimpleNamespace(fits=lambda task: task.prompt != "0")  # type: ignore[assignment]
    tasks = [*tasks_of("1", "0", name="easy"), *tasks_of("0.5", "0", "0", name="hard")]
    found = await limited.evaluate(3, tasks)
    assert (found.accuracy, found.num_tasks, found.num_skipped) == (0.5, 2, 3)
    assert found.counted == "2 of 5 (prompts too long: 3)"
    assert {name: (score.num_tasks, score.num_skipped) for name, score in found.sets.items()} == {
        "easy": (1, 1), "hard": (1, 2)
    }  # fmt: skip
    assert (found.metrics()["eval/skipped"], found.metrics()["eval/skipped/hard"]) == (3, 2)
    assert not undeclared(found.metrics())
    with pytest.raises(PenstockError, match="the prompts of all 2 tasks leave no space for an answer"):
        await limited.evaluate(3, tasks_of("0", "0"))


async def test_each_answer_has_three_attempts() -> None:
    one = evaluator(Runner())
    with pytest.raises(PenstockError, match="1 of 1 answers"):
        await one.evaluate(0, tasks_of("x"))
    assert set(one.rewards.calls.values()) == {MAX_ATTEMPTS}  # type: ignore[attr-defined]


def test_of_graded_rewards_the_mean_is_the_headline() -> None:
    solved = SetScore(0.25, 0.5, 4, {"2": 0.5})
    assert str(solved) == "accuracy 0.250, mean reward 0.500, pass@2 0.500"
    assert str(replace(solved, accuracy=0.0)) == "mean reward 0.500, none solved"
    assert str(SetScore(0.0, 0.0, 4)) == "accuracy 0.000, mean reward 0.000"


def test_the_best_evaluation_has_the_highest_accuracy_then_reward_and_is_of_a_trained_policy() -> None:
    def one(step: int, accuracy: float, reward_mean: float) -> Evaluation:
        return Evaluation(accuracy, reward_mean, 4, step=step, version_min=step, version_max=step)

    before = one(0, 1.0, 1.0)
    assert best_of([before]) is None
    graded = [before, one(20, 0.0, 0.4), one(40, 0.0, 0.6), one(60, 0.0, 0.6)]
    assert best_of(graded) is graded[2], "the first of equals"
    solved = one(80, 0.1, 0.2)
    assert best_of([*graded, solved]) is solved


def step_files(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.parquet"))


async def test_the_answers_are_stored_with_their_evaluation_set(tmp_path: Path) -> None:
    one = evaluator(Runner(), 2, temperature=1.0, max_failed_share=0.5)
    one.table = EvaluationTable(tmp_path)
    await one.evaluate(20, [*tasks_of("1 x", name="easy"), *tasks_of("0 0.5", name="hard")])
    assert step_files(tmp_path) == ["evaluations/step_000020.parquet"]
    rows = read_trajectories(tmp_path / "evaluations" / "step_000020.parquet")
    shown = [(row["trajectory_id"], row["group_id"], row["evaluation_set"], row["reward"], row["step"]) for row in rows]
    assert shown == [("0/0", 0, "easy", 1.0, 20), ("1/0", 1, "hard", 0.0, 20), ("1/1", 1, "hard", 0.5, 20)]
    assert [row["response"] for row in rows] == ["0", "2", "3"]


def test_so_many_answers_of_each_set_are_stored_those_to_its_first_tasks(tmp_path: Path) -> None:
    answers: list[tuple[Task, Sequence[Trajectory]]] = []
    for name in ("easy", "hard"):
        tasks = tasks_of(*[""] * (MAX_ROWS_PER_SET // 3 + 5), name=name)
        answers += [(task, [answered("a"), answered("b"), answered("c")]) for task in tasks]
    EvaluationTable(tmp_path).write(1, answers)
    rows = pq.ParquetFile(tmp_path / "evaluations" / "step_000001.parquet").read().to_pylist()
    assert Counter(row["evaluation_set"] for row in rows) == {"easy": MAX_ROWS_PER_SET, "hard": MAX_ROWS_PER_SET}
    assert [row["trajectory_id"] for row in rows[:4]] == ["0/0", "0/1", "0/2", "1/0"]


def test_a_set_has_files_of_its_own_with_the_answers_of_the_reward(tmp_path: Path) -> None:
    answer = answered("a")
    answer.answer = "7"
    EvaluationTable(tmp_path).write(1, [(tasks_of("")[0], [answer])], "hard")
    assert step_files(tmp_path) == ["evaluations/hard/step_000001.parquet"]
    rows = read_trajectories(tmp_path / "evaluations" / "hard" / "step_000001.parquet")
    assert [row["answer"] for row in rows] == ["7"]
    EvaluationTable(tmp_path).files.drop_after(0)
    assert step_files(tmp_path) == []


def test_files_of_steps_that_were_lost_are_removed_for_both_policies(tmp_path: Path) -> None:
    for table in (EvaluationTable(tmp_path), EvaluationTable(tmp_path, PARTNER)):
        for step in (0, 20, 40):
            table.write(step, [(tasks_of("")[0], [answered("a")])])
    EvaluationTable(tmp_path).files.drop_after(20)
    kept = ["step_000000.parquet", "step_000020.parquet"]
    assert step_files(tmp_path) == [
        *(f"evaluations/partner/{name}" for name in kept),
        *(f"evaluations/{name}" for name in kept),
    ]


def test_a_full_disk_does_not_end_the_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evaluations").write_text("a file in place of the folder")
    EvaluationTable(tmp_path).write(3, [(tasks_of("")[0], [answered("a")])])
    assert "step_000003.parquet cannot be written" in caplog.text


def share_of_draws(is_solved: Sequence[bool], k: int, good: Callable[[Sequence[bool]], bool]) -> float:
    draws = list(combinations(is_solved, k))
    return sum(good(draw) for draw in draws) / len(draws)


@given(
    st.lists(st.booleans(), min_size=1, max_size=9).flatmap(
        lambda one: st.tuples(st.just(one), st.integers(1, len(one)))
    )
)
def test_pass_at_k_is_the_share_of_all_draws_of_k_answers_that_hold_a_solution(case: tuple[list[bool], int]) -> None:
    is_solved, k = case
    assert pass_at_k(len(is_solved), sum(is_solved), k) == pytest.approx(share_of_draws(is_solved, k, any))


def test_pass_at_k_of_many_answers_is_finite() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", True)], 1.0),
        ([("7", True), ("8", False), ("8", False)], 0.0),
        ([("7", True), ("7", True), ("8", False)], 1.0),
        ([("7", True), ("8", False)], 0.5),  # a tie is drawn
        ([("7", True), ("8", False), ("9", False)], 1 / 3),
        ([("7", True), ("7", False), ("8", False)], 0.5),  # of the same answer, one was judged to solve it
        ([("", False), ("", False), ("7", True)], 1.0),  # no answer has no vote
        ([("", False), ("", False)], 0.0),
    ],
)
def test_the_most_frequent_answer_decides(votes: list[tuple[str, bool]], expected: float) -> None:
    assert majority_solves(votes) == pytest.approx(expected)


async def test_answers_vote_by_what_the_reward_read_and_the_texts_differ() -> None:
    tasks = tasks_of("1=7 0=8 1=7", "1=7 0=8 0=8", "0= 0= 1=7")
    found = await evaluator(Runner(), 3, temperature=1.0).evaluate(3, tasks)
    assert found.maj_at == pytest.approx({"3": 2 / 3})
    assert found.metrics()["eval/maj_at/3"] == pytest.approx(2 / 3)
    assert undeclared(found.metrics()) == []
    assert evaluation_from(json.loads(json.dumps(asdict(found)))) == found


async def test_without_an_answer_of_the_reward_texts_vote_and_tasks_with_failed_answers_are_left_out() -> None:
    class Same(Runner):
        async def run(self, context: Any, member: int, sampling: SamplingParams) -> Trajectory:
            ran = await super().run(context, member, sampling)
            return replace(ran, response=f" {int(ran.response) % 3 // 2} ")  # the first two of three are alike

    class Ordered(Rewards):
        async def score(self, task: Task, trajectory: Trajectory) -> Score:
            number = int(trajectory.trajectory_id.partition("/")[2])
            return await super().score(task, replace(trajectory, response=str(number)))

    one = evaluator(Same(), 3, temperature=1.0, max_failed_share=0.5)
    one.rewards = Ordered(3)
    found = await one.evaluate(3, tasks_of("1 1 0", "0 0 1", "1 1 x"))
    assert found.maj_at == {"3": 0.5}


async def test_texts_vote_on_a_task_whose_reward_names_no_answer_though_that_of_another_task_does() -> None:
    found = await evaluator(Runner(), 3, temperature=1.0).evaluate(3, tasks_of("1=7 0=8 1=7", "1 1 1"))
    assert (found.accuracy, found.maj_at) == (5 / 6, {"3": 1.0})


async def test_a_set_has_its_own_sampling_and_its_figures_end_with_its_name() -> None:
    runner = Runner()
    sets = {"hard": {"answers_per_task": 2, "temperature": 0.5}}
    one = evaluator(runner, 1, sets=sets)
    one.rewards = Rewards(2)
    found = await one.evaluate(3, tasks_of("1 0"), "hard")
    assert [sampling.temperature for _, sampling in runner.requests] == [0.5, 0.5]
    metrics = found.metrics("hard")
    assert (metrics["eval/accuracy/hard"], metrics["eval/pass_at/2/hard"]) == (0.5, 1.0)
    assert all(key.endswith("/hard") for key in metrics)
    assert undeclared(metrics) == []
    assert (one.num_answered, one.num_wanted) == (0, 0)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([], 0),
        ([0.9], 0),  # of the policy before training, which does not count
        ([0.9, 0.3], 0),
        ([0.2, 0.3, 0.4], 0),
        ([0.2, 0.5, 0.4, 0.3], 2),
        ([0.2, 0.5, 0.5, 0.5], 2),  # an equal one is not better
        ([0.2, 0.5, 0.3, 0.4, 0.6, 0.1], 1),
    ],
)
def test_evaluations_since_the_best_one_are_counted(accuracies: list[float], expected: int) -> None:
    evaluations = [
        Evaluation(accuracy, 0.5, 1, step=10 * step, version_min=0, version_max=0)
        for step, accuracy in enumerate(accuracies)
    ]
    assert num_since_best(evaluations) == expected
