"""Real training steps with a learning rate of 0, each published through a folder of the file system.

Any change by a publish itself (rounding, order of parts, padding, a version buffer that is read while it is written)
adds up over many publishes, and at a learning rate of 0 nothing else changes weights. `SOAK_PUBLISHES=2000` is the long
form.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.trainer.build import build_trainer
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from penstock.weights.config import NUM_BUFFERS
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import default_directory, private_directory
from tests.layouts import torch_layout

from .engine_harness import make_spec, prompt_of, within

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]
NUM_PUBLISHES = int(os.environ.get("SOAK_PUBLISHES", "200"))
PROMPT = prompt_of(9)


def trainer_of(model: ModelConfig, lr: float) -> PolicyTrainer:
    optimizer = OptimizerConfig(lr=1.0, weight_decay=0.1).model_copy(update={"lr": lr})  # a run refuses 0
    spec = TrainerSpec(
        model_path=str(model.path),
        model=model,
        trainer=TrainerConfig(backend="torch", max_tokens_per_micro_batch=512, optimizer=optimizer),
        algorithm=AlgorithmConfig(),
        device="cpu",
        threads=1,
        seed=0,
        temperature=1.0,
        max_new_tokens=32,
    )
    return build_trainer(spec)


class Publishing:
    """A trainer and an engine of one process, with the version buffers in a folder."""

    def __init__(self, trainer: PolicyTrainer, engine: TorchEngine, model: ModelConfig, directory: Path) -> None:
        self.trainer, self.engine, self.version = trainer, engine, -1
        side = torch_layout(trainer.training_sharding().tensors)
        self._transfer = ShardTransfer.between(trainer.training_sharding(), side, "float32", str(directory))
        self._writer = ShardWriter(self._transfer, 0, ShardFiles(self._transfer))

    async def publish(self) -> int:
        """Returns the checksum that the engine has read back from its live parameters."""
        self.version += 1
        tensors = self.trainer.local_weights()
        self._writer.write(self.version, tensors)
        manifest = self._transfer.manifest(self.version, self._writer.sums(tensors))
        ack = await within(self.engine.update_weights(manifest))
        assert (ack.version, ack.checksum) == (self.version, manifest.checksum)
        return ack.checksum

    def step(self, number: int) -> dict[str, float]:
        rng = np.random.default_rng(number)
        examples = [(rng.integers(2, 30, 6).tolist(), rng.integers(2, 30, 8).tolist()) for _ in range(2)]
        return dict(self.trainer.supervised_step(examples))


@pytest_asyncio.fixture(loop_scope="module")
async def engine(tiny_model_config: ModelConfig) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(make_spec(tiny_model_config, TorchEngineConfig(type="torch", max_num_seqs=4), "keep_kv"))
    await within(engine.start())
    yield engine
    await within(engine.shutdown())


async def answer(engine: TorchEngine, name: str) -> tuple[list[int], list[float]]:
    request = GenerateRequest(RequestId(name), tuple(PROMPT), SamplingParams(24, 0.0))
    deltas = [delta async for delta in engine.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], [p for delta in deltas for p in delta.logprobs]


async def test_training_at_a_learning_rate_of_0_and_publishing_every_step_changes_no_logprob(
    engine: TorchEngine, tiny_model_config: ModelConfig, tmp_path: Path
) -> None:
    directory = private_directory(str(tmp_path))
    publishing = Publishing(trainer_of(tiny_model_config, lr=0.0), engine, tiny_model_config, directory)
    first = await publishing.publish()
    files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("rank*"))
    assert files == [f"buffer{index}/rank0" for index in range(NUM_BUFFERS)]
    assert default_directory() not in directory.parents, "a folder of the file system, not shared memory"
    before = await answer(engine, "before")
    norms = []
    for number in range(NUM_PUBLISHES):
        norms.append(publishing.step(number)["loss/grad_norm"])
        assert await publishing.publish() == first
    assert min(norms) > 0.0, "every step had a gradient"
    assert await answer(engine, "after") == before, "bit for bit"
    examples = [(PROMPT, before[0])]
    np.testing.assert_allclose(before[1], publishing.trainer.token_logprobs(examples), atol=1e-4)


async def test_the_same_with_a_learning_rate_moves_every_version(
    engine: TorchEngine, tiny_model_config: ModelConfig, tmp_path: Path
) -> None:
    """What the soak would miss if the steps or the publishes did nothing."""
    publishing = Publishing(trainer_of(tiny_model_config, lr=1e-3), engine, tiny_model_config, tmp_path)
    checksums, answers = [await publishing.publish()], [await answer(engine, "at v0")]
    for number in range(3):
        publishing.step(number)
        checksums.append(await publishing.publish())
        answers.append(await answer(engine, f"at v{number + 1}"))
    assert len(set(checksums)) == 4
    assert len({tuple(logprobs) for _, logprobs in answers}) == 4
    tokens, logprobs = answers[-1]
    np.testing.assert_allclose(logprobs, publishing.trainer.token_logprobs([(PROMPT, tokens)]), atol=1e-4)
