"""Two policies in one run: which policy samples which trajectory, training, publishing, and rejected configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError, TrainingError
from penstock.dataflow.ids import PARTNER, POLICY, EngineId, TaskId
from penstock.dataflow.ports import PublishReport, StepReport, WrittenFile
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import actor_factory
from penstock.platform.cluster.placement import RolePlacement, plan_placement
from penstock.platform.run.evaluation import Evaluation
from penstock.platform.run.two_policies import TwoPolicyEvaluator, TwoPolicyPublisher, TwoPolicyTrainer
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import SharedGroups, TrajectoryRunner
from penstock.trainer.spec import TrainerSpec
from tests.fakes import FakeEngine
from tests.flows import CODEC

EXPERIMENT = "experiment=arithmetic_two_policies"


def runner_on(engine: FakeEngine) -> TrajectoryRunner:
    return TrajectoryRunner(EnginePool([engine], 4), CODEC, 5.0)


async def test_even_members_are_the_policys_and_odd_ones_its_partners() -> None:
    mine, other = FakeEngine(version=3), FakeEngine(version=2, fail_first=1)
    shared = SharedGroups(runner_on(mine), runner_on(other))
    task, sampling = Task(TaskId("t"), "1+1="), SamplingParams(50, stop_token_ids=CODEC.stop_token_ids)
    sampled = [await shared.run(RolloutContext(task, "0"), member, sampling) for member in range(4)]
    assert [one.policy_id for one in sampled] == [POLICY, PARTNER, POLICY, PARTNER]
    assert [one.spans[0].version for one in sampled] == [3, 2, 3, 2]
    assert (mine.served, other.served) == (2, 3)
    assert shared.stats.interruptions == {"lost": 1}, "on either's engines"


@dataclass
class FakeTrainer:
    """Skips the steps from versions in `bad`."""

    bad: set[int] = field(default_factory=set)
    version: int = 0
    trained: list[list[str]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)

    async def step(self, batch):
        self.trained.append(list(batch))
        is_skipped = self.version in self.bad
        self.version += not is_skipped
        return StepReport(self.version, is_skipped, {"loss/policy": float(self.version)}, busy_s=1.0)

    async def save(self, path: str) -> None:
        self.saved.append(path)

    async def snapshot(self) -> float:
        return float(self.version)

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        self.saved.append(folder)
        return [WrittenFile("trainer_00000.safetensors", 10, self.version)]


async def test_both_train_every_batch() -> None:
    mine, other = FakeTrainer(), FakeTrainer()
    report = await TwoPolicyTrainer(mine, other, 3).step(["a", "b"])
    assert mine.trained == other.trained == [["a", "b"]]
    assert (report.version, report.skipped) == (1, False)
    assert report.metrics == {"loss/policy": 1.0, "partner/loss/policy": 1.0}


async def test_a_version_is_a_trained_batch_even_if_one_of_them_skipped_it() -> None:
    mine, other = FakeTrainer(), FakeTrainer(bad={0})
    together = TwoPolicyTrainer(mine, other, 3)
    assert (await together.step([])).version == 1
    assert other.version == 1, "it publishes the same weights under the new version, and counts staleness from it"
    assert (await together.step([])).version == 2


async def test_a_batch_that_both_skip_is_dropped() -> None:
    report = await TwoPolicyTrainer(FakeTrainer(bad={0}), FakeTrainer(bad={0}), 3).step([])
    assert (report.version, report.skipped) == (0, True)


async def test_bad_steps_of_either_end_the_run() -> None:
    together = TwoPolicyTrainer(FakeTrainer(), FakeTrainer(bad={0, 1}), 2)
    await together.step([])
    with pytest.raises(TrainingError, match="2 steps in a row of the partner had a non-finite loss"):
        await together.step([])


async def test_each_is_saved_in_a_folder_of_its_own(tmp_path: Path) -> None:
    mine, other = FakeTrainer(), FakeTrainer()
    await TwoPolicyTrainer(mine, other, 3).save(str(tmp_path / "step_3" / "policy"))
    assert mine.saved == [str(tmp_path / "step_3" / "policy")]
    assert other.saved == [str(tmp_path / "step_3" / "partner")]


async def test_a_checkpoint_has_the_partner_in_a_folder_of_its_own() -> None:
    mine, other = FakeTrainer(version=3), FakeTrainer(version=4)
    together = TwoPolicyTrainer(mine, other, 3)
    assert await together.snapshot() == 4.0, "the longer of the two"
    files = await together.write_checkpoint("/checkpoint")
    assert (mine.saved, other.saved) == (["/checkpoint"], ["/checkpoint/partner"])
    assert [(file.name, file.crc32) for file in files] == [
        ("trainer_00000.safetensors", 3),
        ("partner/trainer_00000.safetensors", 4),
    ]


class FakePublisher:
    def __init__(self, num_bytes: int, max_logprob_diff: float | None) -> None:
        acks = (EngineId("e"),)
        self.report = PublishReport(
            0, num_bytes, 0.1 * num_bytes, 0.2 * num_bytes, acks, 1, max_logprob_diff, 5, changed_share=max_logprob_diff
        )

    async def publish(self, version: int) -> PublishReport:
        return replace(self.report, version=version)


async def test_a_publish_counts_what_was_written_again_for_either() -> None:
    mine, other = FakePublisher(3, None), FakePublisher(2, None)
    other.report = replace(other.report, rewrites=1)
    assert (await TwoPolicyPublisher(mine, other).publish(4)).rewrites == 1


async def test_a_publish_is_over_when_both_are_and_costs_what_both_cost() -> None:
    report = await TwoPolicyPublisher(FakePublisher(3, None), FakePublisher(2, 0.5)).publish(4)
    assert (report.version, report.num_bytes, report.sent_bytes, len(report.acks)) == (4, 5, 10, 2)
    assert (report.send_s, report.total_s) == pytest.approx((0.3, 0.6)), "they go at the same time"
    assert (report.max_logprob_diff, report.drain_timeouts) == (0.5, 2)
    assert report.changed_share == 0.5


class FakeEvaluator:
    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    async def evaluate(self, step: int, tasks: list[Task], name: str = "") -> Evaluation:
        return Evaluation(self.accuracy, self.accuracy, len(tasks), step=step, version_min=step, version_max=step)


async def test_both_are_evaluated_on_the_same_tasks() -> None:
    found = await TwoPolicyEvaluator(FakeEvaluator(0.25), FakeEvaluator(0.75)).evaluate(7, [Task(TaskId("t"), "?")])
    assert (found.metrics()["eval/accuracy"], found.metrics()["eval/partner_accuracy"]) == (0.25, 0.75)
    assert "eval/partner_accuracy" not in found.partner.metrics()


def name_of(placement: RolePlacement) -> str:
    return f"{placement.policy_id}-{placement.role}-{placement.index}"


def test_both_get_a_trainer_and_engines_and_share_the_rest() -> None:
    placements = plan_placement(compose_config([EXPERIMENT, "rollout.num_engines=2"]))
    names = [name_of(placement) for placement in placements if placement.role not in ("driver", "reward")]
    of_one = ["trainer-0", "engine-0", "engine-1"]
    assert names == [*(f"policy-{name}" for name in of_one), *(f"partner-{name}" for name in of_one)]


def test_the_engines_of_both_have_names_and_so_logs_of_their_own() -> None:
    config = compose_config([EXPERIMENT, "rollout.num_engines=2"])
    mine, others = actor_factory.engine_specs(config), actor_factory.engine_specs(config.partner_view, PARTNER)
    names = [spec.engine_id for spec in (*mine, *others)]
    assert names == ["engine-0", "engine-1", "partner-engine-0", "partner-engine-1"]
    assert [actor_factory.engine_index(name) for name in names] == [0, 1, 0, 1]


def test_on_gpus_the_partner_takes_the_slots_after_the_policys() -> None:
    config = compose_config([EXPERIMENT, "cluster=eight_gpu", "trainer.num_ranks=2", "rollout.num_engines=2"])
    slots = {name_of(one): one.slot for one in plan_placement(config) if one.device == "gpu"}
    assert slots == {
        "policy-trainer-0": 0, "policy-trainer-1": 1, "partner-trainer-0": 2, "partner-trainer-1": 3,
        "policy-engine-0": 0, "policy-engine-1": 1, "partner-engine-0": 2, "partner-engine-1": 3,
    }, "engines have a pool of their own"  # fmt: skip


def test_the_partner_has_its_own_optimizer_if_it_is_given_one() -> None:
    assert compose_config([EXPERIMENT]).partner_view.trainer.optimizer.lr == 5e-5
    given = compose_config([EXPERIMENT, "partner.optimizer={lr: 1e-4}"]).partner_view
    assert (given.trainer.optimizer.lr, given.partner, given.model.shape.num_layers) == (1e-4, None, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm/correction=none"], "as if the policy had sampled them. Use algorithm/correction=f_tis"),
        (["algorithm/correction=[opsm]"], "as if the policy had sampled them"),
        (["dataflow.group_size=7"], "dataflow.group_size=7 is odd: half of each group"),
        (["partner.model.shape.vocab_size=40"], "vocab_size=40 differs from model.shape.vocab_size=32"),
        (["partner.model.path=null"], "partner.model.path is not set"),
        (["dataflow.stream_micro_batches=true"], "partner with dataflow.stream_micro_batches=True"),
        (["algorithm.kl.coefficient=0.1"], "partner with algorithm.kl.coefficient=0.1: the reference scores"),
        (["cluster.colocated=true", "dataflow.max_staleness=0"], "partner with cluster.colocated=True"),
        (["algorithm.proximal=interpolate", "algorithm.epochs=2"], "partner with algorithm.proximal=interpolate"),
    ],
)  # fmt: skip
def test_what_two_policies_cannot_share_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        compose_config([EXPERIMENT, *overrides])
    assert any(words in violation for violation in raised.value.violations), raised.value.violations


@pytest.mark.parametrize("algorithm", ["dppo", "topr", "cispo", "gspo"])
def test_losses_that_use_the_behavior_policy_need_no_correction(algorithm: str) -> None:
    compose_config([EXPERIMENT, f"algorithm={algorithm}", "algorithm/correction=none"])


async def test_only_the_training_of_two_policies_keeps_weights_before_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else `penstock sft` with a partner in its configuration would write the weights before its first step."""
    started: list[TrainerSpec] = []

    async def start_trainer(spec: TrainerSpec, *_others: object) -> None:
        started.append(spec)

    monkeypatch.setattr(actor_factory, "start_trainer", start_trainer)
    for experiment in ("arithmetic_two_policies", "arithmetic"):
        for command in ("train", "sft"):
            await actor_factory.start_trainer_group(compose_config([f"experiment={experiment}"]), "x", command=command)
    assert [spec.has_partner for spec in started] == [True, False, False, False]
