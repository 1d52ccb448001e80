"""How trajectories are generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.settings import MAX_TIMEOUT_S, Settings
from penstock.rollout.engine_pool.routing import RoutingName
from penstock.weights.model_config import DTYPE_BYTES, DType

CPU_KV_CACHE_GIB = 0.25
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 32
"""Tokens of a block of vLLM's KV cache: by default, and the smallest that its CPU build takes."""
KV_CACHE_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
MAX_TOP_K = 64
"""Largest support of a token that is recorded."""


class VllmEngineConfig(Settings):
    """A vLLM engine (rollout/engines/vllm/engine.py)."""

    type: Literal["vllm"]
    """Always `vllm`."""
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    """Trajectories decoded at once by one engine."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one engine is split over."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV-cache memory of one engine on each of its devices, GiB; None takes what `gpu_memory_utilization` leaves, and
    is `CPU_KV_CACHE_GIB` on a CPU, which has no device memory to share."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a device's memory for the engine in all: weights, KV cache, and the staged version that waits for its
    swap; with `cluster.colocated=true` also for what the trainer keeps between steps. Without effect if
    `kv_cache_gib` is set."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Data type of the KV cache; `auto` is `model.dtype`."""
    enforce_eager: bool = False
    """Skip CUDA graphs and compilation. A CPU engine is always eager."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vLLM by name. Those that would break recording, versions or layouts are refused."""
    journal_interval_tokens: int = Field(default=64, ge=1, le=64)
    """Tokens of a trajectory are reported at least this often."""

    def cache_gib(self, device: Literal["cpu", "gpu", "cuda"]) -> float | None:
        """KV cache of one engine on `device`, GiB; None if vLLM computes it from the memory that is left."""
        return CPU_KV_CACHE_GIB if self.kv_cache_gib is None and device == "cpu" else self.kv_cache_gib

    def cache_bytes(self, dtype: DType) -> int:
        """Of one element of the KV cache of a model that computes in `dtype`."""
        return KV_CACHE_BYTES.get(self.kv_cache_dtype, DTYPE_BYTES[dtype])

    def block_tokens(self, device: Literal["cpu", "gpu", "cuda"]) -> int:
        """Tokens of a block of the KV cache, which only sequences that begin with all of them share."""
        stated = str(self.args.get("block_size"))
        if stated.isdigit() and int(stated) > 0:  # anything else is refused by vLLM's parser
            return int(stated)
        return CPU_BLOCK_TOKENS if device == "cpu" else BLOCK_TOKENS

    def vllm_utilization(self, weights_bytes: float, staged_bytes: float, device_bytes: float) -> float:
        """`gpu_memory_utilization` for vLLM, which refuses to start if less than this share of the device is free.

        With `kv_cache_gib`, vLLM computes nothing else from it, and a trainer may already have the rest of the device:
        (weights + KV cache) / device. Without, vLLM's share ends where the memory for the next version begins.

        Args:
            weights_bytes: Weights of the engine on one device.
            staged_bytes: What the next version takes there while it waits for its swap.
            device_bytes: Memory of the device.

        Raises:
            ConfigError: If the device is too small.
        """
        device = f"{device_bytes / 2**30:.1f} GiB"
        if self.kv_cache_gib is not None:
            share = (weights_bytes + self.kv_cache_gib * 2**30) / device_bytes
            if share > 1:
                raise ConfigError(
                    [
                        f"rollout.engine.kv_cache_gib={self.kv_cache_gib:g} and {weights_bytes / 2**30:.1f} GiB of "
                        f"weights exceed the {device} of the device. Lower it, or use a larger tensor_parallel_size."
                    ]
                )
            return share
        left = self.gpu_memory_utilization - staged_bytes / device_bytes
        if left <= 0:
            raise ConfigError(
                [
                    f"rollout.engine.gpu_memory_utilization={self.gpu_memory_utilization:g} of {device} is less than "
                    f"the {staged_bytes / 2**30:.1f} GiB that the next version takes while it waits for its swap. "
                    "Raise it, use a larger tensor_parallel_size, or weights.staging=bucket."
                ]
            )
        return left


class TorchEngineConfig(Settings):
    """The plain torch engine (rollout/engines/torch/engine.py): for machines without vLLM and for fast tests."""

    type: Literal["torch"]
    """Always `torch`."""
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    """Trajectories decoded at once by one engine."""
    journal_interval_tokens: int = Field(default=64, ge=1, le=64)
    """Tokens of a trajectory are reported at least this often."""
    deterministic: bool = False
    """Forward passes of one fixed shape, `max_num_seqs` rows over `model.max_context_tokens`, so that the tokens of a
    request do not depend on the rest of its batch (docs/concepts/determinism.md). Slower."""

    def cache_bytes(self, dtype: DType) -> int:
        """Of one element of the KV cache."""
        return DTYPE_BYTES[dtype]

    @property
    def tensor_parallel_size(self) -> int:
        """It runs on one device."""
        return 1


EngineConfig = Annotated[VllmEngineConfig | TorchEngineConfig, Field(discriminator="type")]


class SamplingConfig(Settings):
    """How the policy samples during training.

    From a truncated distribution, the ids that each token was sampled from are recorded with it, and the trainer
    renormalises over them (docs/concepts/truncated-sampling.md).
    """

    max_new_tokens: int = Field(gt=0)
    """Longest answer, tokens; below `model.max_context_tokens`."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Applied by the engine and, identically, by the trainer's logprobs; `sft` and `dpo` train at 1."""
    top_k: int = Field(default=0, ge=0, le=MAX_TOP_K)
    """Sample from so many most likely tokens; 0 from all. `top_p` and `min_p` need one, so that what they leave can be
    recorded."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest most likely tokens that together have this probability."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the largest probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn. The token that completes one is its last; the text stays in the answer, and all its tokens
    carry loss. A special token is not text: name it in `stop_token_ids`."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ids that end a turn, in addition to the end tokens of the tokenizer and the generation config, and the special
    token with which the chat template ends an answer."""


class RolloutConfig(Settings):
    """Engines and sampling."""

    engine: EngineConfig
    num_engines: int = Field(default=1, ge=1, le=10_000)
    """Engines; each holds the whole policy."""
    sampling: SamplingConfig
    request_timeout_s: float = Field(default=600.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest wait for the next tokens of one request, seconds, before its engine counts as lost."""
    max_resumes: int = Field(default=3, ge=0)
    """Interruptions in a row, without a new token between them, that one trajectory survives by resuming from its
    tokens."""
    max_engine_restarts_per_hour: int = Field(default=6, ge=0)
    """How often within an hour an engine that was lost or fenced is restarted; it receives the current version before
    it serves. Colocated engines are not restarted."""
    routing: RoutingName = "prefix_aware"
    """`prefix_aware` keeps the trajectories of a group on one engine while that is not too busy
    (rollout/engine_pool/routing.py); `least_loaded` does not."""
    start_timeout_s: float = Field(default=1800.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest wait for all engines to start, seconds: a download, loading, compilation. Those that are not up are named
    every minute."""
