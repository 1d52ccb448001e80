"""Publishing into engines without memory for a second shard: the driver's side of weights/streaming.py.

Consumes: a new version of the trainer. Waits for: a crossing with the engines that lack it, then for the training ranks
to sum what they will send. Unblocked by: their answers; the version itself leaves when the engines are frozen
(streaming.py), and stays as it is with the training ranks until then.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.actors.crossing import GRACE_S, GroupExport
from penstock.actors.ends import EngineSlots
from penstock.actors.exports import Departure, Parcel, departed
from penstock.actors.streaming import Streaming
from penstock.actors.trainer_client import TrainerClient
from penstock.dataflow.ports import WeightManifest
from penstock.weights.checksum import PartialSum
from penstock.weights.config import WeightsConfig
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import DType
from penstock.weights.streaming import ON_THE_WAY
from penstock.weights.transport.crossing import Announced, Crossing
from penstock.weights.transport.group import TransferGroup

LEG_SHARE = 0.5
"""Of `weights.timeout_s`, for each message: who hangs is found before the whole publish is late, for all engines."""


class StreamExport(GroupExport):
    """Training ranks send each version into the live parameters of frozen engines."""

    def __init__(
        self, trainer: TrainerClient, ends: EngineSlots, layout: EngineSide, dtype: DType, config: WeightsConfig
    ) -> None:
        super().__init__(trainer, ends, layout, dtype, config)
        self._engines = ends
        self._leg_s = LEG_SHARE * config.timeout_s
        self._streaming: Streaming | None = None

    async def begin(self, version: int) -> Departure:
        if self._streaming is not None:
            await self._streaming.over()
        self._engines.lacking = version  # on a second try those that have taken it serve, and are left alone
        crossing = await self._get_ready(version)
        await self._trainer.ask("hold_weights", self._config.overlap)
        announced = await self._trainer.ask("announce_weights", timeout_s=self._config.timeout_s)
        self._streaming = self._stream(version, crossing)
        sent_bytes = sum(one.num_bytes for one in announced)
        return departed(Parcel(_manifest(version, crossing, announced), self._streaming, sent_bytes))

    def _stream(self, version: int, crossing: Crossing) -> Streaming:
        num_before, self._num_sent = self._num_sent, self._num_sent + 1

        async def send() -> None:
            await self._trainer.ask("send_weights", version, timeout_s=self._config.timeout_s + GRACE_S)

        def interrupt(cause: str) -> None:
            if self._crossing is crossing:
                self._crossing = None
            TransferGroup.interrupt(self._store, crossing.generation, num_before, crossing.members, cause)

        return Streaming(version, [end.name for end in crossing.ends], send, interrupt)


def _manifest(version: int, crossing: Crossing, announced: list[Announced]) -> WeightManifest:
    sums = tuple(one for rank in announced for one in rank.sums)
    parts = [PartialSum(one.rank, one.buffer, one.checksum) for one in sums]
    return replace(crossing.transfer.manifest(version, parts), location=ON_THE_WAY, bucket_sums=sums)
