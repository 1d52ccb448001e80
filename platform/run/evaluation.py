"""Evaluation on held-out tasks. It uses the engines of the rollouts and is not recorded in the ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import comb
from statistics import fmean
from typing import Any

from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import RewardWorker
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.loading import load_task_source
from penstock.envs.streams import MAIN, held_out_tasks
from penstock.platform.cluster.session import as_trained
from penstock.platform.config.schema import EvaluationConfig, RunConfig, is_within, set_stream
from penstock.platform.metrics.evaluation_table import AnswerTable
from penstock.platform.metrics.summary import EvaluatedOn
from penstock.platform.run.lifecycle import first_error
from penstock.platform.run.saved_config import differences
from penstock.rollout.config import SamplingConfig
from penstock.rollout.trajectory.prompt_limit import PromptLimit
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import RolloutRunner, TrajectoryRunner

MEASURING_KEYS = (
    "seed",
    "env",
    "reward",
    *(f"rollout.sampling.{name}" for name in SamplingConfig.model_fields if name != "temperature"),
    "dataflow.pass_reward",
    "evaluation.num_tasks",
    "evaluation.answers_per_task",
    "evaluation.temperature",
    "evaluation.part",
)
"""Keys that change what an evaluation measures, so that two with different values cannot be compared."""
MAX_ATTEMPTS = 3
MAX_FAILURE_REASONS = 5
"""Reasons of failed answers that an evaluation keeps, the most frequent ones."""


@dataclass(frozen=True, slots=True)
class SetScore:
    """The figures of an evaluation, or of one of its sets, over the answers that could be sampled and scored."""

    accuracy: float
    """Share of answers that solve their task: avg@k, if there are k answers per task."""
    reward_mean: float
    """Mean reward of all answers."""
    num_tasks: int
    """Tasks with an answer."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """j as text -> pass@j, the mean of `pass_at_k` over the tasks, for j = 2, 4, 8, … and k; empty if there is one
    answer per task."""
    num_skipped: int = 0
    """Tasks that were skipped, because their prompt leaves no space for an answer."""
    maj_at: Mapping[str, float] = field(default_factory=dict)
    """k as text -> maj@k, the mean of `majority_solves` over the tasks; empty if there is one answer per task."""

    @property
    def counted(self) -> str:
        """Number of tasks, of how many if some were skipped."""
        if not self.num_skipped:
            return str(self.num_tasks)
        return f"{self.num_tasks} of {self.num_tasks + self.num_skipped} (prompts too long: {self.num_skipped})"

    def __str__(self) -> str:
        # A reward of which no answer passes is measured by its mean; an accuracy of 0 would say nothing.
        is_graded = not self.accuracy and self.reward_mean
        shown = "" if is_graded else f"accuracy {self.accuracy:.3f}, "
        passed = "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items())
        passed += "".join(f", maj@{k} {share:.3f}" for k, share in self.maj_at.items())
        return f"{shown}mean reward {self.reward_mean:.3f}{', none solved' if is_graded else passed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(SetScore):
    """Result of one evaluation. Its own figures are over all sets that the environment names."""

    step: int
    """Version at its start."""
    version_min: int
    """Oldest policy version that sampled a token of the evaluation."""
    version_max: int
    """Newest such version; equal to `version_min` if no weights were published during the evaluation."""
    partner: Evaluation | None = None
    """Evaluation of the partner policy on the same tasks; None in runs of one policy."""
    sets: Mapping[str, SetScore] = field(default_factory=dict)
    """Name of the set that the environment gives -> its result; empty if there is only one set."""
    num_unscorable: int = 0
    """Answers that could not be sampled or scored."""
    num_abstained: int = 0
    """Answers on which the reward had no opinion; they are in no figure either."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Why not -> number of answers; the most frequent reasons."""

    @property
    def rank(self) -> tuple[float, float]:
        """What the best evaluation has most of: accuracy, then mean reward, which decides where no answer passes."""
        return self.accuracy, self.reward_mean

    def metrics(self, name: str = MAIN) -> dict[str, float]:
        """Its figures. Those of a set of `evaluation.sets` end with the name of the set."""
        found = {
            **_metrics(self),
            "eval/version_min": self.version_min,
            "eval/version_max": self.version_max,
            "eval/unscorable": self.num_unscorable,
            "eval/abstained": self.num_abstained,
            **({} if self.partner is None else {"eval/partner_accuracy": self.partner.accuracy}),
        }
        ending = f"/{name}" if name else ""
        named = {f"{key}{ending}": value for key, value in found.items()}
        for inner, score in self.sets.items():
            named |= {f"{key}{ending}/{inner}": value for key, value in _metrics(score).items()}
        return named


def _metrics(score: SetScore) -> dict[str, float]:
    return {
        "eval/accuracy": score.accuracy,
        "eval/reward_mean": score.reward_mean,
        "eval/tasks": score.num_tasks,
        "eval/skipped": score.num_skipped,
        **{f"eval/pass_at/{k}": share for k, share in score.pass_at.items()},
        **{f"eval/maj_at/{k}": share for k, share in score.maj_at.items()},
    }


def evaluation_from(saved: Mapping[str, Any]) -> Evaluation:
    """The evaluation that a checkpoint keeps as a dict."""
    partner = saved["partner"]
    sets = {name: SetScore(**score) for name, score in saved["sets"].items()}
    return Evaluation(**{**saved, "partner": None if partner is None else evaluation_from(partner), "sets": sets})


def load_sets(config: RunConfig) -> dict[str, list[Task]]:
    """Name -> tasks of each set of `evaluation.sets`.

    Raises:
        ConfigError: As `load_task_source`.
        ValueError: As `held_out_tasks`.
    """
    found = {}
    for name, one in config.evaluation.sets.items():
        stream = MAIN if one.env is None else set_stream(name)
        source = load_task_source(config.set_env(name), config.seed)
        found[name] = held_out_tasks(source, config.evaluation.of_set(name).num_tasks, stream)
    return found


def evaluated_on(tasks: Sequence[Task]) -> EvaluatedOn | None:
    """Which tasks an evaluation measures; None if there are none, and so no evaluation."""
    kinds = {task.is_trained_on for task in tasks}
    if len(kinds) == 2:
        return "held-out and training"
    return None if not kinds else "training" if True in kinds else "held-out"


def comparable_evaluations(
    saved: Mapping[str, Any], config: RunConfig
) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """The evaluations of a checkpoint with which those of a run that continues from it can be compared.

    Args:
        saved: What the checkpoint keeps of its run.
        config: Configuration with which it is continued.

    Returns:
        All of them, or none and why: the two measure something else.
    """
    done: Sequence[Mapping[str, Any]] = saved["evaluations"]
    changed = [
        f"{key} was {old} and is {new}"
        for key, (old, new) in differences(saved["config"], as_trained(config).model_dump(mode="json")).items()
        if any(is_within(key, one) for one in MEASURING_KEYS) and key != "reward.num_workers"
    ]
    if not changed or not done:
        return done, None
    others = f" ({len(changed)} such keys)" if len(changed) > 1 else ""
    return (), f"{changed[0]}{others}: evaluations before that measured something else, so none of them is the best"


def best_of(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """The best evaluation of a trained policy, the first of equals; None before the first one."""
    return max((one for one in evaluations if one.step), key=lambda one: one.rank, default=None)


def num_since_best(evaluations: Sequence[Evaluation]) -> int:
    """Number of evaluations after the best one; 0 before the first one of a trained policy."""
    best = best_of(evaluations)
    return 0 if best is None else sum(one.step > best.step for one in evaluations)


def pass_at_k(num_answers: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k answers, drawn from all n without replacement, solves the task.

        pass@k = 1 − C(n − c, k) / C(n, k),  n answers of which c solve it

    It is unbiased for k answers of the policy (Chen et al., Evaluating Large Language Models Trained on Code, 2021,
    arXiv 2107.03374, eq. 1). Requires k ≤ n.
    """
    return 1.0 - comb(num_answers - num_solved, k) / comb(num_answers, k)


def majority_solves(votes: Sequence[tuple[str, bool]]) -> float:
    """Whether the most frequent of k answers to a task solves it: maj@k, self-consistency (Wang et al. 2022, arXiv
    2203.11171).

        maj@k = mean over the most frequent answers a of the share of those equal to a that solve the task

    So of answers that are equally frequent, one is drawn at random. An empty answer has no vote; without votes it is 0.

    Args:
        votes: Of each answer, what it is, and whether it solves the task.
    """
    counts = Counter(answer for answer, _ in votes if answer)
    most = max(counts.values(), default=0)
    first = [answer for answer, count in counts.items() if count == most]
    return fmean(fmean(solves for one, solves in votes if one == answer) for answer in first) if first else 0.0


def measured(answer: Trajectory, part: str | None) -> float:
    """The reward of a scored answer, or a part of it (`evaluation.part`).

    Raises:
        PenstockError: If it has no such part.
    """
    assert answer.reward is not None, "it is scored"
    if part is None:
        return answer.reward
    if part not in answer.reward_parts:
        raise PenstockError(
            f"evaluation.part={part}: the reward of {answer.task_id} has no such part, so the evaluation has no "
            f"figures. Its parts: {', '.join(answer.reward_parts) or 'none'}."
        )
    return answer.reward_parts[part]


async def sample_and_score(
    runner: RolloutRunner, rewards: RewardWorker, context: RolloutContext, index: int, sampling: SamplingParams
) -> Trajectory:
    """Sample and score trajectory `index` of a task, without recording it in the ledger.

    Raises:
        TrajectoryError: The error of the last attempt, if all `MAX_ATTEMPTS` attempts failed.
    """
    failure: TrajectoryError | None = None
    for _ in range(MAX_ATTEMPTS):
        try:
            trajectory = await runner.run(context, index, sampling)
            score = await rewards.score(context.task, trajectory)
        except TrajectoryError as error:
            failure = error
        else:
            trajectory.score(score.reward, score.parts)
            trajectory.answer = score.answer
            return trajectory
    assert failure is not None, "MAX_ATTEMPTS is at least 1"
    raise failure


@dataclass(slots=True)
class Evaluator:
    """Samples answers to held-out tasks and scores them."""

    runner: TrajectoryRunner
    """Samples from the policy."""
    rewards: RewardWorker
    """Score the answers."""
    sampling: SamplingParams
    """As in training, but for the temperature."""
    config: EvaluationConfig
    """Answers per task, their temperature, the tolerated share of failures, and which part of the reward counts; and
    what of it differs in each of its sets."""
    pass_reward: float
    """`dataflow.pass_reward`, the reward (or its part) from which an answer solves its task."""
    table: AnswerTable | None = None
    """Stores the answers; None stores none."""
    limit: PromptLimit | None = None
    """Which tasks fit; others are skipped and counted. None tries all."""
    num_answered: int = 0
    """Answers of the running evaluations that were scored or given up."""
    num_wanted: int = 0
    """All answers of them."""

    async def evaluate(self, step: int, tasks: Sequence[Task], name: str = MAIN) -> Evaluation:
        """Evaluate on `tasks`, with the settings of a set of `evaluation.sets`, or those of `evaluation`.

        Several may run concurrently.

        Raises:
            PenstockError: If more than `max_failed_share` of the answers could not be sampled or scored, the reward has
                an opinion on none, no engine is left, or an answer has no `evaluation.part`. A failure is never counted
                as reward 0.
        """
        config = self.config.of_set(name)
        size, drawn = config.answers_per_task, replace(self.sampling, temperature=config.temperature)
        failures: list[TrajectoryError] = []
        skipped = Counter(task.evaluation_set for task in tasks if self.limit is not None and not self.limit.fits(task))
        if skipped:
            tasks = [task for task in tasks if self.limit is None or self.limit.fits(task)]
        if not tasks:
            raise PenstockError(
                f"evaluation: the prompts of all {skipped.total()} tasks leave no space for an answer, so there is no "
                "figure. Use a larger model.max_context_tokens, or other held-out tasks."
            )
        num_wanted, num_answered = size * len(tasks), 0
        self.num_wanted += num_wanted

        async def answer(context: RolloutContext, index: int, number: int) -> Trajectory | None:
            # Below zero: the ids of training groups are not, and an evaluation must not repeat their draws.
            nonlocal num_answered
            sampling = drawn.of(GroupId(-1 - index), number)
            try:
                return await sample_and_score(self.runner, self.rewards, context, index * size + number, sampling)
            except TrajectoryError as failure:
                failures.append(failure)
                if len(failures) / num_wanted > config.max_failed_share:
                    raise PenstockError(
                        f"evaluation: {len(failures)} of {num_wanted} answers could not be sampled or scored in "
                        f"{MAX_ATTEMPTS} attempts; evaluation.max_failed_share={config.max_failed_share:g} "
                        f"tolerates fewer. The last one, to {context.task.task_id}: {failure.kind}: {failure.cause}"
                    ) from failure
                return None
            finally:
                self.num_answered += 1
                num_answered += 1

        try:
            # Colocated engines must not be put to sleep between two turns, or while an answer is scored.
            with self.runner.pool.in_use():
                async with asyncio.TaskGroup() as group:
                    contexts = [RolloutContext(task, f"eval-{name}" if name else "eval") for task in tasks]
                    runs = [
                        [group.create_task(answer(context, index, number)) for number in range(size)]
                        for index, context in enumerate(contexts)
                    ]
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.num_wanted -= num_wanted
            self.num_answered -= num_answered
        answers = [
            (task, [trajectory for one in of_task if (trajectory := one.result()) is not None])
            for task, of_task in zip(tasks, runs, strict=True)
        ]
        if self.table is not None:
            await asyncio.to_thread(self.table.write, step, answers, name)
        scored = [one for _, of_task in answers for one in of_task]
        num_abstained = sum(one.has_abstained for one in scored)
        by_set: dict[str, list[list[tuple[float, str]]]] = {}
        for task, of_task in answers:
            judged = [one for one in of_task if not one.has_abstained]
            if judged:
                # What an answer is says the reward; if it does so for none of this task, its text.
                has_answers = any(one.answer is not None for one in judged)
                said = [one.answer or "" if has_answers else one.response.strip() for one in judged]
                rewards = [measured(one, config.part) for one in judged]
                by_set.setdefault(task.evaluation_set, []).append(list(zip(rewards, said, strict=True)))
        if not by_set:
            raise PenstockError(
                f"evaluation: none of the {num_wanted} answers has a reward, so there is no figure: "
                f"{len(failures)} could not be sampled or scored, and on {num_abstained} the reward had no opinion "
                "(None). Return a number for held-out tasks."
            )
        every = [judged for of_set in by_set.values() for judged in of_set]
        reasons = Counter(f"{failure.kind}: {failure.cause}" for failure in failures)
        return Evaluation(
            **asdict(self._score(every, size, skipped.total())),
            step=step,
            version_min=min(one.oldest_version for one in scored),
            version_max=max(one.newest_version for one in scored),
            sets={
                inner: self._score(of_set, size, skipped[inner]) for inner, of_set in sorted(by_set.items()) if inner
            },
            num_unscorable=len(failures),
            num_abstained=num_abstained,
            failures=dict(reasons.most_common(MAX_FAILURE_REASONS)),
        )

    def _score(self, judged: Sequence[Sequence[tuple[float, str]]], size: int, num_skipped: int = 0) -> SetScore:
        """The figures of tasks, each with the rewards of its answers and what they are, of `size` that were asked."""
        every = [reward for of_task in judged for reward, _ in of_task]
        votes = [[(answer, reward >= self.pass_reward) for reward, answer in of_task] for of_task in judged]
        counts = [(len(of_task), sum(solves for _, solves in of_task)) for of_task in votes]
        pass_at, maj_at = {}, {}
        for k in sorted({2**power for power in range(1, size.bit_length())} | ({size} if size > 1 else set())):
            # A task whose other answers failed has too few for a large k.
            if shares := [pass_at_k(answered, solved, k) for answered, solved in counts if answered >= k]:
                pass_at[str(k)] = fmean(shares)
        if size > 1 and (majorities := [majority_solves(of_task) for of_task in votes if len(of_task) == size]):
            maj_at[str(size)] = fmean(majorities)
        accuracy = sum(solved for _, solved in counts) / len(every)
        return SetScore(accuracy, fmean(every), len(judged), pass_at, num_skipped, maj_at)


class TwoPolicyEvaluator:
    """Evaluates both policies on the same tasks concurrently, each on its own engines."""

    def __init__(self, policy: Evaluator, partner: Evaluator) -> None:
        self._evaluators = (policy, partner)

    @property
    def num_answered(self) -> int:
        return sum(one.num_answered for one in self._evaluators)

    @property
    def num_wanted(self) -> int:
        return sum(one.num_wanted for one in self._evaluators)

    async def evaluate(self, step: int, tasks: Sequence[Task], name: str = MAIN) -> Evaluation:
        mine, other = await asyncio.gather(*(one.evaluate(step, tasks, name) for one in self._evaluators))
        return replace(mine, partner=other)
