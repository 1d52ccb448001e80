"""Trainer ranks as Ray actors: a step runs while a checkpoint is written, and new ranks continue from its files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import ray

from penstock.actors.cluster import Resources, start_trainer
from penstock.actors.processes import end_processes, ray_processes
from penstock.dataflow.errors import CheckpointError, TrainingError
from penstock.trainer.checkpoint import CheckpointReader, verify
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.spec import TrainerSpec
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shared_memory import remove_directories_of

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(300)]

EXAMPLES = [((5, 6, 7), (8, 9, 10)), ((4, 5), (6, 7, 8, 9))]


@pytest_asyncio.fixture
async def spec(tiny_model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TrainerSpec]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    try:
        yield TrainerSpec(
            model_path=str(tiny_model_config.path),
            model=tiny_model_config,
            trainer=TrainerConfig(backend="torch", max_tokens_per_micro_batch=512, optimizer=OptimizerConfig(lr=1e-3)),
            algorithm=AlgorithmConfig(),
            device="cpu",
            threads=1,
            seed=0,
            temperature=1.0,
            max_new_tokens=8,
        )
    finally:
        processes = ray_processes()
        ray.shutdown()
        end_processes(processes)
        remove_directories_of(process.pid for process in processes)


async def test_new_ranks_continue_from_what_was_written_during_a_step(spec: TrainerSpec, tmp_path: Path) -> None:
    environment = {"DS_ACCELERATOR": "cpu"}
    trainer = await start_trainer(spec, [Resources()], environment)
    with pytest.raises(CheckpointError, match="trainer rank 0: no snapshot was taken"):
        await trainer.write_checkpoint(str(tmp_path))
    await trainer.supervised_step(EXAMPLES)
    trainer.version = 5
    assert await trainer.snapshot() > 0
    files, expected = await asyncio.gather(trainer.write_checkpoint(str(tmp_path)), trainer.supervised_step(EXAMPLES))
    verify(tmp_path, files)
    assert CheckpointReader(tmp_path).counters.version == 5
    restored = await start_trainer(replace(spec, restore_from=str(tmp_path)), [Resources()], environment)
    assert restored.version == 5
    assert (await restored.supervised_step(EXAMPLES))["sft/loss"] == expected["sft/loss"]
    (tmp_path / files[0].name).unlink()
    with pytest.raises(TrainingError, match=r"trainer: start failed: CheckpointError: .*0 files trainer_"):
        await start_trainer(replace(spec, restore_from=str(tmp_path)), [Resources()], environment)
