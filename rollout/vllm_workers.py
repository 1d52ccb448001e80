"""What a vLLM engine asks of its workers for a version, and how it waits for what they do beside decoding.

Consumes: a version's manifest. Waits for: every worker, which is asked again and again, because a call into it would
hold up decoding. Unblocked by: their answers, the first that says what is wrong, or `stage_timeout_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.rollout.local_engine import EngineSpec
from penstock.rollout.vllm_worker import decode_entries
from penstock.weights.streaming import ON_THE_WAY

POLL_S = 0.002

Call = Callable[..., Awaitable[Sequence[Any]]]
"""vLLM's `collective_rpc`: a method of all workers by its name, with `args`."""


class Workers:
    """All workers of one engine."""

    def __init__(self, call: Call, spec: EngineSpec) -> None:
        self._call = call
        self._spec = spec

    async def stage(self, manifest: WeightManifest, update: dict[str, Any]) -> tuple[TensorEntry, ...]:
        """Let them fetch and check their part while requests go on; returns what their parameters must be.

        Raises:
            WeightSyncError: If the engine cannot take it, or what arrived is not what was sent.
        """
        refusals = await self._call("penstock_stage", args=(update, self._spec.bucket_bytes))
        if any(refusals):
            why = next(filter(None, refusals))
            raise WeightSyncError(f"publish v{manifest.version} on {self._spec.engine_id}: {why}")
        if manifest.location == ON_THE_WAY:
            return manifest.entries
        answers = await self.until_done(f"publish v{manifest.version}: staging", "penstock_staged", manifest.version)
        return tuple(entry for _, _, rows in answers for entry in decode_entries(rows))

    async def stream(self, manifest: WeightManifest) -> None:
        """Let them receive it into their live parameters; nothing may be decoded meanwhile.

        Raises:
            WeightSyncError: If a bucket is damaged, or does not come.
        """
        sums = [(bucket, rank, buffer, f"{checksum:x}") for bucket, rank, buffer, checksum in manifest.bucket_sums]
        await self._call("penstock_stream", args=(manifest.version, sums))
        await self.until_done(f"publish v{manifest.version}: streaming", "penstock_beside")

    async def until_done(self, what: str, method: str, *arguments: Any) -> list[Any]:
        """Answers of all workers, once each has ended what it does beside decoding.

        Raises:
            WeightSyncError: If it failed in one, or has not ended in time.
        """
        started = time.monotonic()
        while True:
            answers = await self._call(method, args=arguments)
            if wrong := [error for _, error, *_ in answers if error]:
                raise WeightSyncError(f"{self._spec.engine_id}: {wrong[0]}")
            if all(is_done for is_done, *_ in answers):
                return list(answers)
            if time.monotonic() - started > self._spec.stage_timeout_s:
                late = ", ".join(str(rank) for rank, (is_done, *_) in enumerate(answers) if not is_done)
                limit = f"{self._spec.stage_timeout_s:g} s (weights.timeout_s)"
                raise WeightSyncError(f"{what}: rank {late} of {self._spec.engine_id} has not ended it after {limit}.")
            await asyncio.sleep(POLL_S)
