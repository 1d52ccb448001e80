"""How trajectories are generated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.limits import MAX_TIMEOUT_S
from penstock.rollout.pool.routing import RoutingName

CPU_KV_CACHE_GIB = 0.25


class VllmEngineConfig(BaseModel):
    """A vLLM engine (rollout/engines/vllm/engine.py).

    Attributes:
        type: Always `vllm`.
        max_num_seqs: Trajectories decoded at once by one engine.
        tensor_parallel_size: Devices that one engine is split over.
        kv_cache_gib: KV-cache memory of one engine on each of its devices, GiB; None lets vLLM take what
            `gpu_memory_utilization` leaves, and is `CPU_KV_CACHE_GIB` on a CPU, which has no device memory to share.
        gpu_memory_utilization: Share of a device's memory for the engine in all: weights, KV cache, and the
            staged version that waits for its swap.
        enforce_eager: Skip CUDA graphs and compilation. A CPU engine is always eager.
        journal_interval_tokens: Tokens of a trajectory are reported at least this often.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    type: Literal["vllm"]
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    tensor_parallel_size: int = Field(default=1, ge=1)
    kv_cache_gib: float | None = Field(default=None, gt=0)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    enforce_eager: bool = False
    journal_interval_tokens: int = Field(default=64, ge=1, le=64)

    def cache_gib(self, device: Literal["cpu", "gpu", "cuda"]) -> float | None:
        """KV cache of one engine on `device`, GiB; None if vLLM computes it from the memory that is left."""
        return CPU_KV_CACHE_GIB if self.kv_cache_gib is None and device == "cpu" else self.kv_cache_gib

    def utilization_without(self, staged_bytes: float, device_bytes: float) -> float:
        """The share of a device of `device_bytes` for vLLM when `staged_bytes` of it are reserved for the next version.

        Raises:
            ConfigError: If nothing is left.
        """
        left = self.gpu_memory_utilization - staged_bytes / device_bytes
        if left <= 0:
            raise ConfigError(
                [
                    f"rollout.engine.gpu_memory_utilization={self.gpu_memory_utilization:g} of "
                    f"{device_bytes / 2**30:.1f} GiB is less than the {staged_bytes / 2**30:.1f} GiB that the next "
                    "version takes while it waits for its swap. Raise it, use a larger tensor_parallel_size, or "
                    "weights.staging=bucket."
                ]
            )
        return left


class TorchEngineConfig(BaseModel):
    """The plain torch engine (rollout/engines/torch/engine.py): for machines without vLLM and for fast tests.

    Attributes:
        type: Always `torch`.
        max_num_seqs: Trajectories decoded at once by one engine.
        journal_interval_tokens: Tokens of a trajectory are reported at least this often.
        deterministic: Forward passes of one fixed shape, `max_num_seqs` rows over `model.max_context_tokens`, so that
            the tokens of a request do not depend on the rest of its batch (docs/concepts/determinism.md). Slower.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["torch"]
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    journal_interval_tokens: int = Field(default=64, ge=1, le=64)
    deterministic: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """It runs on one device."""
        return 1


EngineConfig = Annotated[VllmEngineConfig | TorchEngineConfig, Field(discriminator="type")]


class SamplingConfig(BaseModel):
    """How the policy samples during training: from the whole vocabulary, over which the trainer computes logprobs.

    Attributes:
        max_new_tokens: Longest answer, tokens; below `model.max_context_tokens`.
        temperature: Applied by the engine and, identically, by the trainer's logprobs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(default=1.0, gt=0, le=10)


class RolloutConfig(BaseModel):
    """Engines and sampling.

    Attributes:
        num_engines: Engines; each holds the whole policy.
        request_timeout_s: Longest wait for the next tokens of one request, seconds, before its engine counts as lost.
        max_resumes: Interruptions in a row, without a new token between them, that one trajectory survives by resuming
            from its tokens.
        max_engine_restarts_per_hour: How often within an hour an engine that was lost or fenced is restarted; it
            receives the current version before it serves. Colocated engines are not restarted.
        routing: `prefix_aware` keeps the trajectories of a group on one engine while that is not too busy
            (rollout/pool/routing.py); `least_loaded` does not.
        start_timeout_s: Longest wait for all engines to start, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engine: EngineConfig
    num_engines: int = Field(default=1, ge=1, le=10_000)
    sampling: SamplingConfig
    request_timeout_s: float = Field(default=600.0, ge=1, le=MAX_TIMEOUT_S)
    max_resumes: int = Field(default=3, ge=0)
    max_engine_restarts_per_hour: int = Field(default=6, ge=0)
    routing: RoutingName = "prefix_aware"
    start_timeout_s: float = Field(default=300.0, ge=1, le=MAX_TIMEOUT_S)
