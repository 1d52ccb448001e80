"""`penstock train` in the process of the test: its own loop, flow, engines and trainer, without Ray.

What Ray would start as actors is called here: torch engines as they are, one trainer rank and frozen policies in
threads, a reward worker over its child process. Everything else is what `penstock train` runs, so a run leaves the same
folder behind. The runs through the command line are in the same files, for `make test-full`.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.actors.weights.publisher import Probe
from penstock.dataflow.ids import PARTNER, POLICY, EngineId, PolicyId
from penstock.dataflow.ports import PublishReport, StepReport, WrittenFile
from penstock.dataflow.trajectory import GroupPayload, GroupRef
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import engine_specs, model_path, trainer_spec
from penstock.platform.config.schema import FROZEN_ROLES, FrozenRole, RunConfig
from penstock.platform.run import build, training
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.checkpoint import write_snapshot
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.spec import TrainerSpec
from penstock.weights.transport.shared_memory import private_directory, write_version


def payload_of(group: GroupRef) -> GroupPayload:
    """As `actors.trainer.payloads_of`, where handles are the things themselves."""
    scores = {"reference": group.reference, "teacher": group.teacher}
    return replace(group.handle, min_version=group.min_version, **scores)


class InProcessTrainer:
    """One rank: `TrainerGroup`, with early logprobs. Its thread keeps the order of the calls, as an actor does."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.version = 0
        self._spec = spec
        self._thread = ThreadPoolExecutor(1)
        self._directory = private_directory(spec.publish_in)
        self._trainer: Any = None
        self._snapshot: Any = None

    async def start(self) -> None:
        spec = self._spec
        self._trainer = await self._call(lambda: build_trainer(spec))
        if spec.restore_from is not None:
            self.version = await self._call(lambda: self._trainer.restore(spec.restore_from))

    async def step(self, batch: Sequence[GroupRef]) -> StepReport:
        payloads = [payload_of(group) for group in batch]
        report = await self._call(lambda: self._trainer.step(payloads, self.version))
        self.version = report.version
        return report

    async def set_learning_rate(self, settings: Any) -> int:
        await self._call(lambda: self._trainer.set_learning_rate(settings))
        return self.version

    async def early_logprobs(self, group: GroupRef) -> None:
        await self._call(lambda: self._trainer.early_logprobs([payload_of(group)], self.version))

    async def stop_step(self) -> bool:
        return self._trainer.stop.request()

    async def wait_for_step(self) -> None:
        pass

    async def save(self, path: str) -> None:
        await asyncio.to_thread(lambda: self._save(path))

    def _save(self, path: str) -> None:
        save_policy(self._trainer, path, self._spec.model_path, [self._trainer.held_weights(self.version)])

    async def snapshot(self) -> float:
        self._snapshot = await self._call(lambda: self._trainer.snapshot(self.version))
        return 0.0

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        return [await asyncio.to_thread(write_snapshot, self._snapshot, folder, 0)]

    async def token_logprobs(self, examples: Any, routes: Any = ()) -> np.ndarray:
        return await self._call(lambda: self._trainer.token_logprobs(examples, routes))

    async def write(self, version: int) -> Any:
        """Write all weights into a file; the version before is no longer needed."""
        for old in self._directory.iterdir():
            old.unlink()
        tensors, dtype = self._trainer.export_weights, self._spec.model.dtype
        return await self._call(lambda: write_version(tensors(), version, dtype, self._directory))

    def close(self) -> None:
        self._thread.shutdown()
        if self._trainer is not None:
            self._trainer.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _call(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass
class InProcessPublisher:
    """`WeightPublisher` that writes one file and has every engine read it, one after the other."""

    trainer: InProcessTrainer
    pool: EnginePool
    probe: Probe
    probe_every: int
    last: PublishReport | None = None

    async def publish(self, version: int) -> PublishReport:
        manifest = await self.trainer.write(version)
        acks = [await cast("TorchEngine", engine).update_weights(manifest) for engine in self.pool.engines()]
        assert {ack.checksum for ack in acks} == {manifest.checksum}
        self.pool.refresh()
        is_probed = self.probe_every and version % self.probe_every == 0
        max_logprob_diff = await self.probe(version) if is_probed else None
        self.last = PublishReport(version, manifest.num_bytes, 0.0, 0.0, acks, max_logprob_diff=max_logprob_diff)
        return self.last

    async def delivered(self) -> PublishReport:
        assert self.last is not None
        return self.last

    async def catch_up(self, engine: object) -> None:
        raise AssertionError("no engine is lost here")

    async def close(self) -> None:
        pass


class InProcessStore:
    """`PayloadStore` whose handles are the payloads."""

    async def put(self, payload: GroupPayload) -> GroupPayload:
        return payload

    async def get(self, handle: GroupPayload) -> GroupPayload:
        return handle


class InProcessLogprobs:
    """Logprobs of a policy that is not trained."""

    def __init__(self, config: RunConfig, role: FrozenRole) -> None:
        path = config.frozen(role).path or model_path(config)
        limits = (config.trainer.max_group_tokens, config.rollout.sampling.temperature)
        self._policy = FrozenPolicy.load(path, config.model, "cpu", *limits)

    async def logprobs(self, handle: GroupPayload) -> np.ndarray:
        return await asyncio.to_thread(self._policy.logprobs, handle)


@dataclass(frozen=True)
class InProcessActors:
    """What `roles.RunActors` is to `penstock train`."""

    engines: list[TorchEngine]
    trainer: InProcessTrainer
    rewards: RewardRunner
    store: InProcessStore
    reference: InProcessLogprobs | None
    teacher: InProcessLogprobs | None
    partner: InProcessActors | None = None

    async def publisher(self, pool: EnginePool, config: RunConfig, probe: Probe) -> InProcessPublisher:
        return InProcessPublisher(self.trainer, pool, probe, config.weights.probe_every)

    async def lost_ranks(self) -> list[str]:
        return []

    async def restarted(self, config: RunConfig, engine_id: EngineId) -> TorchEngine:
        raise AssertionError(f"{engine_id} is lost")


@asynccontextmanager
async def start_in_process(
    config: RunConfig, restore_from: str | None = None, _pending: set[str] | None = None
) -> AsyncIterator[InProcessActors]:
    """What `roles.start_actors` is to `penstock train`."""
    rewards = RewardRunner(config.reward, config.sandbox, "cpu")
    policies: list[InProcessActors] = []
    try:
        if config.partner is not None:
            of_partner = None if restore_from is None else str(Path(restore_from) / PARTNER)
            policies.append(await start_policy(config.partner_view, rewards, PARTNER, restore_from=of_partner))
        policies.append(await start_policy(config, rewards, POLICY, *policies, restore_from=restore_from))
        yield policies[-1]
    finally:
        await rewards.shutdown()
        for policy in policies:
            policy.trainer.close()
            for engine in policy.engines:
                await engine.shutdown()


async def start_policy(
    config: RunConfig,
    rewards: RewardRunner,
    policy_id: PolicyId,
    partner: InProcessActors | None = None,
    restore_from: str | None = None,
) -> InProcessActors:
    """Trainer and engines of one policy, and what scores its groups."""
    trainer = InProcessTrainer(replace(trainer_spec(config, policy_id=policy_id), restore_from=restore_from))
    engines = [TorchEngine(spec) for spec in engine_specs(config)]
    await trainer.start()
    for engine in engines:
        await engine.start()
    frozen = [InProcessLogprobs(config, role) if config.num_frozen(role) else None for role in FROZEN_ROLES]
    return InProcessActors(engines, trainer, rewards, InProcessStore(), *frozen, partner)


def train_in_process(folder: Path, overrides: Sequence[str]) -> None:
    """`penstock train` with these overrides in `folder`; user modules there are imported again by every call."""
    with in_process(folder):
        config = compose_config(list(overrides))
        assert asyncio.run(training._train(config, prepare_run_dir(config))) == 0


@contextmanager
def in_process(folder: Path) -> Iterator[None]:
    """Within it, runs have their actors in this process and their files in `folder`."""
    known, threads = set(sys.modules), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        patch.setattr(build, "start_actors", start_in_process)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            for name in set(sys.modules) - known:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]
