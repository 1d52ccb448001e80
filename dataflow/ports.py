"""The ports: everything the controller needs from the outside, as small protocols.

Ray actors implement them for real, `platform/simulator` in virtual time, tests with fakes. The
values that cross them are plain data, so nothing above a port knows Ray, vLLM or DeepSpeed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.trajectory import FinishReason, GroupPayload, GroupRef, Task, Trajectory
from penstock.dataflow.versions import Spans


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: Upper limit of sampled tokens for this request.
        temperature: 0 is greedy. Behavior logprobs are those after the temperature.
        stop_token_ids: Sampling stops after any of these; the stop token is included in the output.
        seed: Makes one request's draw repeatable; None draws from the engine's stream. The torch engine keys each draw
            by (seed, position in the sequence), so a request that goes on from its tokens goes on with its draws.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class GenerateRequest(NamedTuple):
    """Token-in: the exact ids the model is to continue."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class TokenDelta(NamedTuple):
    """Token-out: newly sampled tokens of one request.

    Attributes:
        token_ids: At most 64 new ids, in order.
        logprobs: Behavior logprob of each new id, after the sampling transform.
        spans: Versions of exactly these tokens, stamped by the engine.
        finish_reason: Set on the last delta only.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: Spans
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of one engine.

    Attributes:
        version: The policy version it has acknowledged.
        num_running: Requests being decoded.
        num_waiting: Requests queued inside the engine.
        kv_cache_usage: Share of KV-cache blocks in use, 0..1.
        tokens_generated: Absolute counter since the engine started.
        busy_s: Absolute seconds with at least one request running, since the engine started.
        num_preemptions: Absolute counter of requests whose KV cache was given up to make room for others.
    """

    version: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    tokens_generated: int
    busy_s: float
    num_preemptions: int = 0


class Engine(Protocol):
    """One generation engine (an actor, a simulated device, a fake)."""

    engine_id: EngineId

    @property
    def version(self) -> int:
        """The policy version this engine has acknowledged; -1 before the first publish."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Stream what is sampled.

        Raises:
            EngineLostError: It can answer no request; if `is_final`, it never will.
            TrajectoryError: kind `engine`, if it cannot answer this request, and serves the others.
        """
        ...

    async def abort(self, request_id: RequestId) -> None: ...

    async def load(self) -> EngineLoad: ...


@dataclass(slots=True)  # not frozen: one is made for each trajectory, and frozen costs thrice the time
class Score:
    """What a reward worker says of one trajectory."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardWorker(Protocol):
    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """Score one finished trajectory.

        Raises:
            TrajectoryError: kind `reward`, if the reward raised, timed out or returned no number.
        """
        ...


class LogprobWorker(Protocol):
    """A policy that is not trained (the reference, a teacher): it scores groups before their batch is complete."""

    async def logprobs(self, handle: Any) -> Any:
        """Handle of `[n] float32`: of the n sampled tokens of a stored group, members one after another."""
        ...


class EarlyLogprobWorker(Protocol):
    """Trainer ranks that forward a ready group before its batch is complete."""

    async def early_logprobs(self, group: GroupRef) -> None:
        """Compute and keep what the next step needs of a group, with the weights that it will begin with.

        Raises:
            TrainingError: If a rank fails or does not answer in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one training step did.

    Attributes:
        version: The policy version after the step; unchanged when the step was skipped.
        skipped: The optimizer step was not taken (non-finite loss or gradient).
        metrics: Flat `family/name -> value`, names declared in docs/metrics.md.
        busy_s: Wall seconds the trainer was computing, what it forwarded before the step included.
    """

    version: int
    skipped: bool
    metrics: Mapping[str, float]
    busy_s: float


class TrainerGroup(Protocol):
    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport: ...

    async def save(self, path: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a published version, or one parameter of an engine's tensor-parallel rank.

    Attributes:
        checksum: Of its bytes in the wire dtype.
        rank: The tensor-parallel rank, where versions are published in the engine's layout.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int
    rank: int = 0


class AdaptedBox(NamedTuple):
    """A part of an engine rank's parameter that the product of an adapter is added to.

    Attributes:
        rank: The tensor-parallel rank.
        tensor: HF name of the weight.
        rows: Which of them, [start, stop).
        columns: Which of them, [start, stop).
        parameter: The engine's name of what holds them.
        offset: Where in it they begin, elements.
        strides: From row to row and from column to column, elements.
    """

    rank: int
    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    parameter: str
    offset: int
    strides: tuple[int, int]


class AdapterManifest(NamedTuple):
    """A version as what is added to the weights that the engines were loaded with (weights/transport/adapters.py).

    Attributes:
        entries: `<HF name>.lora_A` and `.lora_B`, what the file holds.
        boxes: Where their products go.
    """

    entries: tuple[TensorEntry, ...]
    boxes: tuple[AdaptedBox, ...]


class BucketSum(NamedTuple):
    """What one sender adds, in one bucket, to the checksum of a buffer of an engine rank."""

    bucket: int
    rank: int
    buffer: str
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One message that says everything about a published version.

    Attributes:
        location: Where the bytes are: a file in shared memory, or a handle that the actors resolve to one.
        num_bytes: Size of all tensors, bytes; of the adapters, if only those travel.
        checksum: Combined over all entries, and those of the adapters; what every engine must acknowledge.
        num_shards: Tensor-parallel ranks of an engine, if the entries are its parameters; 0 if they are whole tensors.
        adapters: What travels, if it is not the weights; the entries then are those of the weights below them.
        bucket_sums: Of a version that is still with its senders: what is compared bucket by bucket as it arrives.
    """

    version: int
    location: str
    entries: tuple[TensorEntry, ...]
    num_bytes: int
    checksum: int
    num_shards: int = 0
    adapters: AdapterManifest | None = None
    bucket_sums: tuple[BucketSum, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightAck:
    """An engine's word that it now serves `version`, with the checksum read back from its live weights."""

    engine_id: EngineId
    version: int
    checksum: int
    stage_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One publish: bytes per engine, seconds end to end, longest stall of generation, all acknowledgements.

    Attributes:
        acks: Those there were at its end; with `multi_version` the first one only.
        drain_timeouts: Absolute counter of engines that were frozen because their requests did not end in time.
        max_logprob_diff: Largest difference between a logprob of an engine and of the trainer, if this version was
        probed.
        sent_bytes: By the training ranks to other processes; 0 through shared memory.
        changed_share: Elements whose bits differ from the version before, where a codec has counted them.
        rewrites: Times that the version was written once more because an engine had refused it.
    """

    version: int
    num_bytes: int
    send_s: float
    total_s: float
    acks: Sequence[WeightAck]
    drain_timeouts: int = 0
    max_logprob_diff: float | None = None
    sent_bytes: int = 0
    changed_share: float | None = None
    rewrites: int = 0

    @property
    def max_stall_s(self) -> float:
        return max((ack.stall_s for ack in self.acks), default=0.0)


class WeightPublisher(Protocol):
    async def publish(self, version: int) -> PublishReport:
        """Make a version what new requests are sampled from; the report may be of the one before."""
        ...

    async def delivered(self) -> PublishReport:
        """Wait until engines have the version that was published last."""
        ...


class PayloadStore(Protocol):
    """Where the token and float arrays of ready groups live until they are trained."""

    async def put(self, payload: GroupPayload) -> Any:
        """Store a payload; the returned handle keeps it alive."""
        ...

    async def get(self, handle: Any) -> GroupPayload:
        """What `put` gave this handle for.

        Raises:
            TrainingError: If it is lost, or does not come in time.
        """
        ...
