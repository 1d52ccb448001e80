"""The ports: the protocols through which the controller uses engines, trainers, rewards and stores.

Ray actors implement them in real runs, `platform/simulator` in virtual time, and tests with fakes. Arguments and
results are plain data, so code above a port does not depend on Ray, vLLM or DeepSpeed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import EngineId, RequestId, TrajectoryId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Alternatives, FinishReason, GroupPayload, GroupRef, Routes, Trajectory
from penstock.dataflow.versions import Spans


class GenerateRequest(NamedTuple):
    """A token-in request: the exact token ids that the model continues."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    routes_from: int = 0
    """Index of the first token whose routes are asked for, if the engine records them."""


class TokenDelta(NamedTuple):
    """A token-out chunk: newly sampled tokens of one request."""

    token_ids: tuple[int, ...]
    """At most 64 new ids, in order."""
    logprobs: tuple[float, ...]
    """Behavior logprob of each new id, after the sampling transform."""
    spans: Spans
    """Versions of exactly these tokens, set by the engine."""
    finish_reason: FinishReason | None = None
    """Set on the last delta only."""
    alternatives: Alternatives | None = None
    """The other ids that each new token was sampled from; None if that is the whole vocabulary."""
    routes: Routes | None = None
    """Of all tokens from `routes_from` of the request to the last but one, which predicted the last one; later deltas
    continue. None if the engine records none."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of the load of one engine."""

    version: int
    """The policy version it has acknowledged."""
    num_running: int
    """Requests being decoded."""
    num_waiting: int
    """Requests queued inside the engine."""
    kv_cache_usage: float
    """Share of KV-cache blocks in use, 0..1."""
    tokens_generated: int
    """Absolute counter since the engine started."""
    busy_s: float
    """Absolute seconds with at least one request running, since the engine started."""
    num_preemptions: int = 0
    """Absolute counter of requests whose KV cache was evicted in favour of other requests."""
    request_s: float = 0.0
    """Absolute seconds, summed over the requests, since the engine started."""


class Engine(Protocol):
    """One generation engine (an actor, a simulated device, a fake)."""

    engine_id: EngineId

    @property
    def version(self) -> int:
        """The policy version this engine has acknowledged; -1 before the first publish."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Stream the sampled tokens.

        Raises:
            EngineLostError: If the engine can serve no request; permanently if `is_final`.
            TrajectoryError: Of kind `engine`, if the engine cannot serve this request but serves others.
        """
        ...

    async def abort(self, request_id: RequestId) -> None: ...

    async def load(self) -> EngineLoad: ...


# Not frozen: one is created per trajectory, and constructing frozen instances takes three times as long.
@dataclass(slots=True)
class Score:
    """The reward of one trajectory, and its named parts; None is no opinion."""

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """What the reward read as the answer; None if it does not say."""


class RewardWorker(Protocol):
    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one finished trajectory.

        Raises:
            TrajectoryError: Of kind `reward`, if the reward raised, timed out or returned neither a number nor None.
        """
        ...


TrainedTokens = Mapping[TrajectoryId, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Trajectory -> logprobs and advantages of its tokens when they were trained, `[T]` each; NaN where they were not."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one training step."""

    version: int
    """The policy version after the step; unchanged when the step was skipped."""
    skipped: bool
    """Whether the optimizer step was skipped (non-finite loss or gradient)."""
    metrics: Mapping[str, float]
    """Flat `family/name -> value`, with the names declared in docs/metrics.md."""
    busy_s: float
    """Wall seconds during which the trainer was computing, including early logprobs."""
    trained_tokens: TrainedTokens = field(default_factory=dict)
    """What is known of the tokens of recorded trajectories."""


class WrittenFile(NamedTuple):
    """A file of a checkpoint: its name relative to the folder of the checkpoint, its size, and zlib's crc32."""

    name: str
    num_bytes: int
    crc32: int


class TrainerGroup(Protocol):
    async def step(self, batch: Sequence[GroupRef]) -> StepReport: ...

    async def stop_step(self) -> bool:
        """End the running step, and all later ones, before they change the weights.

        Returns:
            Whether the weights stay as they are; if not, the step that runs is about to be completed.
        """
        ...

    async def wait_for_step(self) -> None:
        """Wait until the running step is completed, if there is one."""
        ...

    async def set_learning_rate(self, settings: Mapping[str, Any]) -> int:
        """Between two steps, take over other settings of `OptimizerConfig` that decide the learning rate.

        Returns:
            The version that was trained last.
        """
        ...

    async def save(self, path: str) -> None:
        """Write the policy to `path`, between steps or after `stop_step`."""
        ...

    async def snapshot(self) -> float:
        """Begin to copy the trainer's state to host memory; returns the seconds that this took.

        Call it between steps, or after `stop_step`. The next optimizer step waits until it is copied.
        """
        ...

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        """Write the last snapshot, while training continues.

        Raises:
            CheckpointError: If a rank cannot write its file, or does not finish in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a published version, or one parameter of an engine's tensor-parallel rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    """Checksum of the bytes in the wire dtype."""
    rank: int = 0
    """The tensor-parallel rank, where versions are published in the engine's layout."""


class AdaptedBox(NamedTuple):
    """A region of an engine rank's parameter to which the product of an adapter is added."""

    rank: int
    """The tensor-parallel rank."""
    tensor: str
    """HF name of the weight."""
    rows: tuple[int, int]
    """Row range [start, stop) of the weight."""
    columns: tuple[int, int]
    """Column range [start, stop) of the weight."""
    parameter: str
    """Name of the engine's parameter that holds the region."""
    offset: int
    """Offset of the region in the parameter, in elements."""
    strides: tuple[int, int]
    """Strides between rows and between columns, in elements."""


class AdapterManifest(NamedTuple):
    """A version that is published as LoRA adapters to the engines' base weights (weights/transport/adapters.py)."""

    entries: tuple[TensorEntry, ...]
    """The tensors of the file, `<HF name>.lora_A` and `.lora_B`."""
    boxes: tuple[AdaptedBox, ...]
    """The regions to which their products are added."""


class BucketSum(NamedTuple):
    """One sender's contribution, in one bucket, to the checksum of a buffer of an engine rank."""

    bucket: int
    rank: int
    buffer: str
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Description of a published version."""

    version: int
    location: str
    """Location of the bytes: a file in shared memory, or a handle that the actors resolve to one."""
    entries: tuple[TensorEntry, ...]
    num_bytes: int
    """Size of the transferred tensors in bytes: of the adapters if only adapters are transferred."""
    checksum: int
    """Combined checksum of all entries and adapter entries, which every engine must acknowledge."""
    num_shards: int = 0
    """Tensor-parallel ranks of an engine if the entries are its parameters; 0 if they are whole tensors."""
    first_shard: int = 0
    """Number of the file of rank 0, if versions are written in the layouts of several kinds of engines."""
    adapters: AdapterManifest | None = None
    """The adapters, if they are transferred instead of weights; `entries` then describes the base weights."""
    bucket_sums: tuple[BucketSum, ...] = ()
    """Checksums per bucket of a version that is sent directly by its trainer ranks, verified on arrival."""


@dataclass(frozen=True, slots=True)
class WeightAck:
    """An engine's acknowledgement that it serves `version`, with the checksum read back from its live weights."""

    engine_id: EngineId
    version: int
    checksum: int
    stage_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Result of one publish: bytes per engine, durations in seconds, and acknowledgements."""

    version: int
    num_bytes: int
    send_s: float
    total_s: float
    acks: Sequence[WeightAck]
    """Acknowledgements at the end of the publish; with `multi_version` only the first one."""
    drain_timeouts: int = 0
    """Absolute counter of engines that were paused because their requests did not finish in time."""
    max_logprob_diff: float | None = None
    """Largest logprob difference between engines and trainer in nats, if this version was checked."""
    sent_bytes: int = 0
    """Bytes sent by the training ranks to other processes; 0 with shared memory."""
    changed_share: float | None = None
    """Share of elements whose bits differ from the previous version, if a codec has counted them."""
    rewrites: int = 0
    """How often the version was written again because an engine had refused it."""

    @property
    def max_stall_s(self) -> float:
        return max((ack.stall_s for ack in self.acks), default=0.0)


class WeightPublisher(Protocol):
    async def publish(self, version: int) -> PublishReport:
        """Publish a version to the engines. With overlapping publishes the report may be that of the previous one."""
        ...

    async def delivered(self) -> PublishReport:
        """Wait until the engines have the version that was published last."""
        ...


class PayloadStore(Protocol):
    """Store of the token and float arrays of ready groups until they are trained."""

    async def put(self, payload: GroupPayload) -> Any:
        """Store a payload; the returned handle keeps it alive."""
        ...

    async def get(self, handle: Any) -> GroupPayload:
        """Return the payload of a handle.

        Raises:
            TrainingError: If the payload is lost or does not arrive in time.
        """
        ...
