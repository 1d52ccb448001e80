"""`max_staleness=0` is the synchronous algorithm: a plain loop without Ray, flow or dataflow core gets the same bits.

docs/concepts/determinism.md says what that needs.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from penstock.dataflow.ids import EngineId, GroupId, RequestId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams, derive_seed
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.envs.loading import load_reward, load_task_source
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.torch.decoding import RunningRequest
from penstock.rollout.engines.torch.engine import load_batch
from penstock.rollout.tokenization.tokenizers import load_codec
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.spec import TrainerSpec
from tests.command_line import read_metric, read_summary
from tests.in_process import train_in_process
from tests.small_run import Train, train_by_command
from tests.tiers import by_tier

STEPS, STALE_STEPS = by_tier(6, 20), 4
COMPARED = ["reward/mean", "reward/std", "length/mean_tokens", "loss/policy", "loss/grad_norm"]
REWARD = """
def variety(trajectory, **_):
    return len(set(trajectory.response)) / 16 - 0.01 * trajectory.num_sampled_tokens
"""

# ---- The comparator: the synchronous algorithm, in at most 60 lines --------------------------------------------------


class SynchronousLoop:
    def __init__(self, config: RunConfig) -> None:
        path, sampling, algorithm = str(config.model.path), config.rollout.sampling, config.algorithm
        spec = EngineSpec(EngineId("loop"), path, config.model, config.rollout.engine, "cpu", "keep_kv", 0, 1)
        alone = {"device": "cpu", "threads": 1, "seed": config.seed}
        limits = {"temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens}
        self.config = config
        self.codec = load_codec(path)
        self.reward = load_reward(config.reward)
        self.engine = load_batch(spec, config.rollout.engine)
        self.trainer = build_trainer(TrainerSpec(path, config.model, config.trainer, algorithm, **alone, **limits))

    def steps(self) -> Iterator[dict[str, float]]:
        """Sample a batch, score it, train on it, load the weights; and again."""
        tasks, batch_groups = (
            load_task_source(self.config.env, self.config.seed).train(),
            self.config.dataflow.batch_groups,
        )
        for version in range(self.config.total_steps):
            self.engine.version, first = version, version * batch_groups
            batch = [self.group(first + index, next(tasks)) for index in range(batch_groups)]
            yield dict(self.trainer.step(batch, version).metrics)
            self.engine.model.load_state_dict(dict(self.trainer.export_weights()), strict=False)  # the head is tied

    def group(self, group_id: int, task: Task) -> GroupPayload:
        """One group, alone in the engine."""
        prompt, sampling = self.codec.encode_prompt(task.prompt), self.config.rollout.sampling
        requests: list[RunningRequest] = []
        for member in range(self.config.dataflow.group_size):
            seed = derive_seed(self.config.seed, group_id, member)
            params = SamplingParams(
                sampling.max_new_tokens,
                sampling.temperature,
                stop_token_ids=self.codec.stop_token_ids,
                seed=seed,
            )
            request = GenerateRequest(RequestId(f"{group_id}/{member}"), prompt, params)
            requests.append(RunningRequest.of(request, self.engine.limits))
            self.engine.submit(requests[-1])
        answers: dict[RequestId, TokenDelta] = {}
        while self.engine.has_requests:
            answers |= dict(self.engine.step())
        members = [self.scored(task, prompt, answers[request.request_id]) for request in requests]
        return GroupPayload(GroupId(group_id), tuple(members))

    def scored(self, task: Task, prompt: tuple[int, ...], answer: TokenDelta) -> Trajectory:
        assert answer.finish_reason is not None, "answers are shorter than journal_interval_tokens: one delta each"
        trajectory = Trajectory(
            trajectory_id=TrajectoryId("loop"),
            task_id=task.task_id,
            token_ids=np.array(prompt + answer.token_ids, dtype=np.int32),
            loss_mask=np.array([False] * len(prompt) + [True] * len(answer.token_ids)),
            behavior_logprobs=np.array((0.0,) * len(prompt) + answer.logprobs, dtype=np.float32),
            spans=answer.spans,
            prompt=str(task.prompt),
            response=self.codec.decode(answer.token_ids),
            finish_reason=answer.finish_reason,
        )
        return replace(trajectory, reward=float(self.reward(trajectory, **task.fields)))


# ---- The runs it is compared with ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the loop reached: metrics of each step, and the SHA-256 of the policy file after some of them."""

    metrics: list[dict[str, float]]
    digests: dict[int, str]


def digest(policy: Path) -> str:
    return hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward that differs between answers of a random policy."""
    place = tmp_path_factory.mktemp("synchronous")
    (place / "variety_reward.py").write_text(REWARD)
    return place


@pytest.fixture(scope="module")
def overrides(tiny_policy_dir: Path) -> list[str]:
    return [
        "experiment=arithmetic",
        "env.args.digits=2",
        f"model.path={tiny_policy_dir}",
        "model.max_context_tokens=32",
        "model.shape.hidden_size=64",
        "model.shape.intermediate_size=128",
        "model.shape.num_layers=2",
        "reward.fn=variety_reward.variety",
        "rollout/engine=torch",
        "rollout.engine.deterministic=true",
        "rollout.engine.max_num_seqs=12",
        "rollout.sampling.max_new_tokens=20",
        "trainer=torch",
        "trainer.optimizer.lr=1e-3",
        "trainer.optimizer.warmup_steps=0",
        "trainer.max_tokens_per_micro_batch=200",  # several micro-batches a step
        "dataflow.batch_groups=4",
        "dataflow.group_size=4",
        "evaluation.num_tasks=8",
        "evaluation.every_steps=0",
        f"total_steps={STEPS}",
        "seed=5",
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(train_in_process, id="in_process"),
        pytest.param(train_by_command, id="by_command", marks=[pytest.mark.integration, pytest.mark.full]),
    ],
)
def train(request: pytest.FixtureRequest) -> Train:
    return request.param


@pytest.fixture(scope="module")
def on_policy_run(train: Train, place: Path, overrides: list[str]) -> Path:
    """On two engines: which one serves a trajectory must not matter."""
    on_policy = ["dataflow.max_staleness=0", "rollout.num_engines=2", "name=on_policy", "overwrite=true"]
    train(place, [*overrides, *on_policy])
    return place / "runs" / "on_policy"


@pytest.fixture(scope="module")
def loop(place: Path, on_policy_run: Path) -> Iterator[Outcome]:
    """The loop under the configuration that the run wrote down."""
    config = RunConfig.model_validate(yaml.safe_load((on_policy_run / "config.yaml").read_text()))
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        importlib.invalidate_caches()
        loop = SynchronousLoop(config)
        outcome = Outcome([], {})
        for step, metrics in enumerate(loop.steps(), 1):
            outcome.metrics.append(metrics)
            if step in (1, STALE_STEPS, STEPS):
                save_policy(loop.trainer, str(place / f"loop{step}"), str(config.model.path))
                outcome.digests[step] = digest(place / f"loop{step}")
    torch.set_num_threads(threads)
    return outcome


def test_max_staleness_zero_gets_the_weights_of_the_synchronous_loop_bit_for_bit(
    on_policy_run: Path, loop: Outcome
) -> None:
    assert len(loop.metrics) == read_summary(on_policy_run)["steps"] == STEPS
    for name in COMPARED:
        assert read_metric(on_policy_run, name) == [metrics[name] for metrics in loop.metrics], name
    assert all(norm > 0 for norm in read_metric(on_policy_run, "loss/grad_norm"))
    assert len(set(loop.digests.values())) == 3, "the weights must have changed, or equality proves nothing"
    assert digest(on_policy_run / "policy") == loop.digests[STEPS]


def test_stale_data_gives_other_weights(train: Train, place: Path, overrides: list[str], loop: Outcome) -> None:
    """The comparison above can fail: the same run, except that it may be off-policy, ends elsewhere."""
    stale = ["dataflow.max_staleness=2", "name=stale", f"total_steps={STALE_STEPS}", "overwrite=true"]
    train(place, [*overrides, *stale])
    run_dir = place / "runs" / "stale"
    assert read_summary(run_dir)["max_staleness_seen"] > 0
    assert (
        read_metric(run_dir, "reward/mean")[0] == loop.metrics[0]["reward/mean"]
    )  # nothing is stale at the first step
    assert digest(run_dir / "policy") != loop.digests[STALE_STEPS]
