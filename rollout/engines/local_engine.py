"""What an engine class offers inside its own process; `actors/engine/actor.py` puts it behind a Ray actor.

Consumes: generate requests and weight manifests. Waits for: the model. Unblocked by: a decode step,
an abort, a finished weight update. Both engines pass one contract suite, tests/contract/engine_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Engine, WeightAck, WeightManifest
from penstock.envs.endpoint.answer_parser import ParsedAnswer, ParserNames, SampledTurn
from penstock.rollout.config import EngineConfig
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.model_config import DType, ModelConfig
from penstock.weights.transport.device_memory import VersionBufferHandle
from penstock.weights.transport.process_group.endpoints import TransferGroupSpec


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that one engine process needs to start."""

    engine_id: EngineId
    model_path: str
    """Hugging Face directory with weights, config and tokenizer."""
    model: ModelConfig
    engine: EngineConfig
    device: Literal["cpu", "cuda"]
    """`cpu` or `cuda`."""
    update_mode: Literal["keep_kv", "recompute_kv"]
    """`keep_kv` keeps running requests' KV cache over a weight update, `recompute_kv` recomputes it."""
    seed: int
    threads: int
    """CPU threads of this process."""
    bucket_bytes: int | None = None
    """Stage at most this much of a version, which is then applied in place; None: stage all of it."""
    stage_timeout_s: float = 120.0
    """Longest wait for a version to be fetched and compared, seconds."""
    publish_in: str | None = None
    """Parent of the folder for versions that come through the object store; None: shared memory."""
    records_routes: bool = False
    """Its deltas tell which experts each token was sent to, if the model has any."""
    profile_steps: tuple[int, ...] = ()
    """Training steps during which it writes a profile to the folder `profile_in`."""
    profile_in: str = "profiles"


class LocalEngine(Engine, Protocol):
    """An engine in its own process."""

    async def start(self) -> None:
        """Load the model and be ready. Version stays -1 until the first `update_weights`."""
        ...

    async def update_weights(self, manifest: WeightManifest) -> WeightAck:
        """Freeze running requests, swap to the manifest's weights, verify by reading back, resume.

        Requests in flight keep their tokens and continue with the new weights. After it returns, every new token is
        stamped with `manifest.version`. Idempotent: the same version is acknowledged again.

        Raises:
            WeightSyncError: A live parameter's checksum differs from the manifest's (both are named).
        """
        ...

    async def forget_versions(self) -> None:
        """Abort all requests and go back to no version (-1), with empty caches.

        After a rollback of the trainer the same version numbers are published again, with other weights.
        """
        ...

    async def profile(self, name: str, seconds: float) -> None:
        """Write a torch profile of the next seconds, in files in `EngineSpec.profile_in` whose names begin with `name`.

        Requests continue, more slowly; they wait while the files are written.
        """
        ...

    async def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Where this engine's ranks hold the tensors of a trainer, by the engine's own loader.

        Args:
            tensors: Names of transformers' modules and full shapes, tied ones once.

        Raises:
            WeightSyncError: If it is not known; whole tensors can still be sent (`weights.transport=gather`).
        """
        ...

    async def make_version_buffers(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> list[list[VersionBufferHandle]]:
        """Allocate a version buffer on each of the engine's devices; later calls return the same memory.

        Args:
            buffers: By rank of the engine: name -> size in elements.
            dtype: Of all of them.
            num_writers: Processes that will write.

        Returns:
            By rank of the engine, a handle for each writer.

        Raises:
            WeightSyncError: If memory of the device cannot be shared.
        """
        ...

    async def join_transfer_group(self, group_spec: TransferGroupSpec, replica: int) -> None:
        """Join a device-to-device transfer group as the `replica`-th receiver; requests continue.

        With in-place updates, `update_weights` receives the version, under the freeze.

        Raises:
            WeightSyncError: If a participant does not join in time, or there is no memory for a version.
        """
        ...

    async def receive(self, version: int) -> None:
        """Receive a version into the version buffers of the engine's devices; requests continue.

        Raises:
            WeightSyncError: If a peer is lost or too late.
        """
        ...

    async def parse_answer(self, turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        """Read a turn by a parser of this engine's library. Requests continue.

        Raises:
            ConfigError: If the library has no such parser, or it does not fit the tokenizer.
        """
        ...

    async def find_parsers(self, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
        """Names of the library's parsers of calls that read every turn as these calls."""
        ...

    async def sleep(self) -> None:
        """Give device memory back while the trainer computes (colocated); only with nothing running."""
        ...

    async def wake(self) -> None: ...

    async def shutdown(self) -> None: ...
