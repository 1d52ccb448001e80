"""The same training steps on every backend: plain torch is what DeepSpeed at any ZeRO stage and rank count must equal.

Ranks are plain processes: this file is also their program (RANK WORLD PORT FOLDER). Each runs all cases of its
world size, since starting one costs more than training in it.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.ports import StepReport
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.tiny_policy import create_policy
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shards import ShardTransfer, ShardWriter, read_shard
from tests.tiny_policy import SPECIAL_TOKENS, tiny_shape
from tests.unit.weights.models import PADDING, vllm_rank

VOCAB = 24
SHAPE = tiny_shape(VOCAB)
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "tests.contract.test_trainer_backends"


@dataclasses.dataclass(frozen=True)
class Case:
    """One trainer configuration; frozen, so that it is a dictionary key."""

    backend: str = "deepspeed"
    world_size: int = 1
    zero_stage: int = 0
    max_tokens: int = 64
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    # ε of AdamW far above the gradient makes an update proportional to it, so weights compare gradients.
    adam_epsilon: float = 1e-8
    streamed: bool = False


REFERENCE = Case(backend="torch")
CASES = [
    Case(zero_stage=0),
    Case(zero_stage=2),
    Case(world_size=2, zero_stage=0),
    Case(world_size=2, zero_stage=1, max_tokens=200),
    Case(world_size=2, zero_stage=1, dtype="bfloat16"),
    Case(world_size=2, zero_stage=0, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=2, max_tokens=40, adam_epsilon=1.0),
    Case(streamed=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=0, streamed=True),
    Case(world_size=2, zero_stage=1, streamed=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=2, streamed=True),
    # ZeRO-3 last: while one of its models lives, transformers loads every model partitioned.
    Case(world_size=2, zero_stage=3),
    Case(world_size=2, zero_stage=3, dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, max_tokens=400, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=3, max_tokens=40, adam_epsilon=1.0, gradient_checkpointing=True),
    Case(world_size=2, zero_stage=3, streamed=True, adam_epsilon=1.0),
]
ENGINES = (("torch", 1), ("vllm", 2))
FLOAT32 = [case for case in CASES if case.dtype == "float32"]


def make_batch(seed: int, *, poisoned: bool = False) -> list[GroupPayload]:
    """Four groups of three, ragged, one of zero variance, some single-token answers."""
    rng = np.random.default_rng(seed)
    payloads = []
    for group in range(4):
        prompt = rng.integers(2, VOCAB, int(rng.integers(2, 8)))
        members = []
        for member in range(3):
            length = 1 if (group, member) == (1, 2) else int(rng.integers(2, 24))
            token_ids = np.concatenate([prompt, rng.integers(2, VOCAB, length)]).astype(np.int32)
            mask = np.arange(len(token_ids)) >= len(prompt)
            behavior = np.where(mask, rng.normal(-3.2, 0.3, len(token_ids)), 0.0).astype(np.float32)
            if poisoned and group == member == 0:
                behavior[-1] = np.nan
            members.append(
                Trajectory(
                    trajectory_id=TrajectoryId(f"{group}/{member}"),
                    task_id=TaskId("t"),
                    token_ids=token_ids,
                    loss_mask=mask,
                    behavior_logprobs=behavior,
                    spans=(Span(0, length),),
                    prompt="",
                    response="",
                    finish_reason="stop",
                    reward=1.0 if group == 2 else float(member % 2),
                )
            )
        payloads.append(GroupPayload(GroupId(group), tuple(members)))
    return payloads


def build(case: Case, model_path: str, rank: int = 0, port: int = 0) -> PolicyTrainer:
    trainer = TrainerConfig(
        backend=case.backend,
        num_ranks=case.world_size,
        zero_stage=case.zero_stage,
        gradient_checkpointing=case.gradient_checkpointing,
        max_tokens_per_micro_batch=case.max_tokens,
        optimizer=OptimizerConfig(
            lr=1.0 if case.adam_epsilon == 1.0 else 1e-3, eps=case.adam_epsilon, gradient_clip_norm=0.05, warmup_steps=2
        ),
    )
    return build_trainer(
        model_path,
        ModelConfig(max_context_tokens=32, shape=SHAPE, dtype=case.dtype),
        trainer,
        AlgorithmConfig(),
        rank=rank,
        world_size=case.world_size,
        master_port=port,
        device="cpu",
        threads=1,
        seed=0,
        temperature=0.7,
        max_new_tokens=32,
    )


def run_case(case: Case, folder: Path, rank: int = 0, port: int = 0) -> dict:
    """Two good steps with a poisoned one between, then one supervised step: all numbers that must agree."""
    trainer = build(case, str(folder / "policy"), rank, port)
    step = streamed_step if case.streamed else PolicyTrainer.step
    reports = [step(trainer, make_batch(1), 0)]
    before = weights_of(trainer)
    reports.append(step(trainer, make_batch(2, poisoned=True), 1))
    after = weights_of(trainer)
    reports.append(step(trainer, make_batch(3), 1))
    examples = [([2, 3], [4, 5, 1]), ([5], [1]), ([7, 8, 9], [3] * 20)]
    supervised = [trainer.supervised_step(examples) for _ in range(2)]
    saved = str(folder / "saved" / "-".join(map(str, dataclasses.astuple(case))))
    save_policy(trainer, saved, str(folder / "policy"))
    result = {
        "reports": reports,
        "sft_loss": [metrics["sft/loss"] for metrics in supervised],
        "accuracy": trainer.teacher_forced(examples),
        "unchanged_by_skip": all(np.array_equal(before[name], after[name]) for name in before),
        "weights": weights_of(trainer),
        "saved": saved,
        "shards": {kind: published(trainer, EngineSide(kind, SHAPE, tp), rank, folder) for kind, tp in ENGINES},
    }
    if rank == 0:
        result["buffers"] = {str(b.dtype) for b in model_of(trainer).buffers() if b.is_floating_point()}
    return result


def published(trainer: PolicyTrainer, engine: EngineSide, rank: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What the ranks of an engine find in the files of a version; every training rank writes its part."""
    where = str(folder / "shards" / engine.type)
    transfer = ShardTransfer.between(trainer.training_side(), engine, "float32", where)
    ShardWriter(transfer, rank).write(1, trainer.local_weights())
    trainer.backend.all_reduce(np.zeros(1), "sum")  # every rank has written
    manifest = transfer.manifest(1, [])
    shards = [dict(read_shard(manifest, tp_rank)) for tp_rank in range(engine.tp_size)]
    found = [{name: tensor.numpy().copy() for name, tensor in shard.items()} for shard in shards]
    trainer.backend.all_reduce(np.zeros(1), "sum")  # every rank has read
    return found


def streamed_step(trainer: PolicyTrainer, batch: list[GroupPayload], version: int) -> StepReport:
    """The same batch in three parts."""
    trainer.accumulate(batch[:1], version, [0])
    trainer.accumulate(batch[1:3], version, [0, 0])
    return trainer.step(batch[3:], version, [0])


def weights_of(trainer: PolicyTrainer) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in trainer.export_weights()}


def model_of(trainer: PolicyTrainer):
    backend = trainer.backend
    return backend._engine.module if hasattr(backend, "_engine") else backend._model


def main() -> None:
    rank, world_size, port, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    results = {case: run_case(case, folder, rank, port) for case in CASES if case.world_size == world_size}
    if rank == 0:
        (folder / f"world{world_size}.pickle").write_bytes(
            pickle.dumps({dataclasses.astuple(case): result for case, result in results.items()})
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    create_policy(ModelConfig(max_context_tokens=32, shape=SHAPE), SPECIAL_TOKENS, str(folder / "policy"), seed=3)
    (folder / "policy" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[float, dict]:
    """Plain torch by AdamW ε."""
    cases = {epsilon: dataclasses.replace(REFERENCE, adam_epsilon=epsilon) for epsilon in (1e-8, 1.0)}
    return {epsilon: run_case(case, folder) for epsilon, case in cases.items()}


@pytest.fixture(scope="module")
def deepspeed_results(folder: Path) -> dict[tuple, dict]:
    results: dict[tuple, dict] = {}
    for world_size in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(rank), str(world_size), str(port), str(folder)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs = []
        try:
            outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(output[-3000:] for output in outputs)
        results |= pickle.loads((folder / f"world{world_size}.pickle").read_bytes())
    return results


def relative_error(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert actual.keys() == expected.keys()
    difference = sum(float(((actual[name] - expected[name]).astype(np.float64) ** 2).sum()) for name in expected)
    return (difference / sum(float((value.astype(np.float64) ** 2).sum()) for value in expected.values())) ** 0.5


def change(result: dict, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in result["weights"].items()}


class TrainerContract:
    """What holds for any backend; `result` and `reference` are given by the subclass."""

    def test_a_non_finite_batch_is_skipped_and_changes_nothing(self, result: dict) -> None:
        assert [report.skipped for report in result["reports"]] == [False, True, False]
        assert [report.version for report in result["reports"]] == [1, 1, 2]
        assert result["unchanged_by_skip"]
        assert result["reports"][1].metrics["loss/grad_norm"] == np.inf

    def test_metrics_equal_plain_torch(self, result: dict, reference: dict) -> None:
        for mine, theirs in zip(result["reports"], reference["reports"], strict=True):
            if mine.skipped:
                continue
            for name, value in theirs.metrics.items():
                if not name.startswith("trainer/"):
                    assert mine.metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
        assert result["sft_loss"] == pytest.approx(reference["sft_loss"], rel=2e-5)
        assert result["accuracy"] == pytest.approx(reference["accuracy"], rel=1e-5)

    def test_weights_equal_plain_torch(self, result: dict, reference: dict) -> None:
        assert relative_error(result["weights"], reference["weights"]) < 1e-5

    def test_what_is_written_for_engines_is_what_is_exported(self, result: dict) -> None:
        (whole,) = result["shards"]["torch"]
        assert whole.keys() == result["weights"].keys()
        for name, weights in result["weights"].items():
            np.testing.assert_array_equal(whole[name], weights.ravel(), err_msg=name)
        for rank, shard in enumerate(result["shards"]["vllm"]):
            reference = vllm_rank(result["weights"], SHAPE, 2, rank)
            assert shard.keys() == reference.keys()
            for name, weights in reference.items():
                np.testing.assert_array_equal(shard[name], np.where(weights == PADDING, 0, weights).ravel(), name)

    def test_what_is_saved_is_what_is_exported(self, result: dict, folder: Path) -> None:
        from safetensors.numpy import load_file

        saved = load_file(Path(result["saved"]) / "model.safetensors")
        assert relative_error(saved, result["weights"]) == 0.0
        assert (Path(result["saved"]) / "tokenizer.json").is_file()


class TestTorchBackend(TrainerContract):
    @pytest.fixture(params=[False, True], ids=["whole", "streamed"])
    def result(self, request: pytest.FixtureRequest, folder: Path) -> dict:
        return run_case(dataclasses.replace(REFERENCE, max_tokens=200, streamed=request.param), folder)

    @pytest.fixture
    def reference(self, references: dict) -> dict:
        return references[1e-8]


@pytest.mark.integration
class TestDeepSpeedBackend(TrainerContract):
    @pytest.fixture(params=FLOAT32, ids=str)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param

    @pytest.fixture
    def result(self, case: Case, deepspeed_results: dict) -> dict:
        return deepspeed_results[dataclasses.astuple(case)]

    @pytest.fixture
    def reference(self, case: Case, references: dict) -> dict:
        return references[case.adam_epsilon]


@pytest.mark.integration
@pytest.mark.parametrize("case", [case for case in FLOAT32 if case.adam_epsilon == 1.0], ids=str)
def test_gradients_are_those_of_plain_torch(
    case: Case, deepspeed_results: dict, references: dict, folder: Path
) -> None:
    start = weights_of(build(REFERENCE, str(folder / "policy")))
    actual = change(deepspeed_results[dataclasses.astuple(case)], start)
    assert relative_error(actual, change(references[1.0], start)) < 1e-5


@pytest.mark.integration
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "bfloat16"], ids=str)
def test_bfloat16_trains_float32_masters_close_to_float32(
    case: Case, deepspeed_results: dict, references: dict
) -> None:
    result = deepspeed_results[dataclasses.astuple(case)]
    expected = references[1e-8]
    assert result["sft_loss"] == pytest.approx(expected["sft_loss"], rel=1e-2)
    assert relative_error(result["weights"], expected["weights"]) < 1e-2
    assert result["buffers"] == {"torch.float32"}, "rotary frequencies lost precision"


if __name__ == "__main__":
    main()
