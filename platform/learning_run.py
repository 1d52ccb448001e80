"""Runs of the trainer alone, without engines: what `penstock sft`, `rm` and `dpo` have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.actors.cluster import ray_session
from penstock.actors.trainer_client import TrainerClient
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.lifecycle import write_failure
from penstock.platform.observability.hub import MetricsHub
from penstock.platform.roles import start_trainer_group
from penstock.platform.run_dir import mark_finished
from penstock.platform.trackers.build import build_trackers
from penstock.trainer.batches.sequences import ModelKind


@asynccontextmanager
async def trainer_alone(
    config: RunConfig, run_dir: Path, path: str, kind: ModelKind = "policy", command: Command = "sft"
) -> AsyncIterator[tuple[TrainerClient, MetricsHub]]:
    """Trackers, Ray and the trainer ranks over the model at `path`; the run is marked finished if nothing failed."""
    hub = MetricsHub(build_trackers(config.tracker, run_dir, config.name, config.model_dump(mode="json")))
    try:
        async with ray_session(config.cluster.address):
            trainer = await start_trainer_group(config, path, kind, command)
            try:
                yield trainer, hub
            finally:
                await trainer.close()
    except BaseException as error:
        write_failure(run_dir, error)
        raise
    finally:
        hub.close(None)
    mark_finished(config)
