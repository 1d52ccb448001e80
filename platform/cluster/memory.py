"""Estimates the memory of each process from the model shape in the configuration, without loading anything.

P parameters, b bytes of `model.dtype`, R trainer ranks, Z ZeRO stage, T tokens of a micro-batch, L layers, H hidden,
Q and K query and key/value width, I intermediate, V vocabulary. Under tensor parallelism of size t, P is the number of
parameters of one rank (all but the embeddings are divided by t), and R, Q, K, I and the V of an untied head are
divided by t.

    trainer weights      P·b          / R if Z = 3
    gradients            P·b          / R if Z ≥ 2
    master weights       4·P          / R if Z ≥ 1; none for float32 at Z = 0
    Adam moments         8·P          / R if Z ≥ 1
    gathered layers      2e9·b / 2 at most, if Z = 3 and R > 1 (DeepSpeed keeps up to 1e9 parameters live)
    activations          T·b·(L·(6H + 2Q + 2K + 4I)), with checkpointing T·b·(L·H + one layer)
    logits               3·4·V·min(T, 1024): chunked, forward and backward
    between steps        a rank keeps weights and optimizer, and its gradients if DeepSpeed never frees their buffer: at
                         Z = 3, and at Z = 1 in bfloat16 without offload_optimizer
    engine               P·b / tp + KV cache, on each of its tp devices; P·b / tp more for a staged version
                         (64 MiB with weights.staging=bucket, none with weights.transport=gather);
                         activations 2048·b·(one layer / tp) + 3·4·V·max_num_seqs
    engine, asleep       its context; 2·P·b of main memory: torch rounds each pinned block up to a power of two
    critic               as a second policy; only one of them has activations at a time
    published            P·b in shared memory, twice unless weights.transport=gather, for each layout of engines; or
                         P·b / tp on each device of an engine, also while it sleeps (weights.transport=cuda_ipc)
    with adapters        of A parameters: gradients, master weights and moments for A only; 4·A in shared memory, and
                         P·b of main memory per engine; if full weights are sent, P·b while a version is merged
    reference, teacher   P·b (of that model) + activations of one layer
    reward with a pool   the same; 2·P on a GPU, 4·P on a CPU
    base                 process without weights (measured on CPU; the CUDA context on GPU)

Accurate to about 20 %, and rather too high.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, num_engine_layouts, weight_route
from penstock.platform.config.schema import PoolConfig, RunConfig
from penstock.rollout.config import VllmEngineConfig
from penstock.weights.model_config import DTYPE_BYTES, DType
from penstock.weights.planner.plan import BUCKET_BYTES

GIB = 1 << 30
LOGITS_CHUNK_TOKENS = 1024
ENGINE_BATCH_TOKENS = 2048
"""Most tokens of one step of a vLLM engine, its default."""
LIVE_PARAMETERS = 1_000_000_000

PAYLOAD_BYTES_PER_TOKEN = 16
"""Size of a stored trajectory: ids 4, loss mask 1, behavior logprobs 4, text and rewards about 7."""
BASE_HOST_GIB = {"driver": 1.2, "trainer": 0.7, "vllm": 1.6, "torch": 0.7, "reward": 0.3}
"""Resident memory of a process after its imports, GiB. `driver` includes Ray's own processes."""
BASE_GPU_HOST_GIB = 3.0
"""Host memory of a process that uses a GPU, GiB."""
CUDA_CONTEXT_GIB = 1.0

Part = Literal["base", "weights", "gradients", "optimizer", "activations", "kv_cache", "published", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process by purpose, GiB.

    Attributes:
        device: Memory on its accelerator; empty on a CPU pool.
        host: Main memory.
    """

    device: dict[Part, float]
    host: dict[Part, float]

    @property
    def device_gib(self) -> float:
        return sum(self.device.values())

    @property
    def host_gib(self) -> float:
        return sum(self.host.values())


def trainer_memory(config: RunConfig, pool: PoolConfig) -> Memory:
    """Memory of one trainer rank."""
    tp, shape, width = config.trainer.tensor_parallel_size, config.model.shape, DTYPE_BYTES[config.model.dtype]
    embeddings = shape.vocab_size * shape.hidden_size  # not split, whole on every rank
    parameters = embeddings + (shape.num_parameters - embeddings) / tp
    stage, ranks = config.trainer.zero_stage, max(1, config.trainer.num_ranks // tp)
    has_masters = config.model.dtype != "float32" or stage > 0
    gathered = min(parameters, LIVE_PARAMETERS) * width if stage == 3 and ranks > 1 else 0
    num_models = 2 if config.algorithm.needs_critic else 1
    trained = parameters * num_models
    if config.trainer.lora is not None:
        trained += adapter_parameters(config) - parameters
    merged = parameters if config.trainer.lora is not None and weight_route(config) != "adapters" else 0
    parameters, activations = parameters * num_models, _activation_bytes(config)
    optimizer = (8 + 4 * has_masters) * trained / (ranks if stage >= 1 else 1) / GIB
    parts: dict[Part, float] = {
        "weights": (parameters * width / (ranks if stage == 3 else 1) + gathered) / GIB,
        "gradients": trained * width / (ranks if stage >= 2 else 1) / GIB,
        "activations": activations / GIB,
        "published": merged * width / (ranks if stage == 3 else 1) / GIB,
    }
    # A rank's copy of its share of the trained state, while a checkpoint is written.
    takes_any = config.checkpoint.every_steps or config.checkpoint.every_minutes
    copied: dict[Part, float] = {
        "checkpoint": trained_state_gib(config) / config.trainer.num_ranks if takes_any else 0.0
    }
    if pool.device == "cpu":
        return Memory({}, {"base": BASE_HOST_GIB["trainer"], **parts, "optimizer": optimizer, **copied})
    host: dict[Part, float] = {"base": BASE_GPU_HOST_GIB, **copied}
    if config.trainer.offload_optimizer:
        return Memory({"base": CUDA_CONTEXT_GIB, **parts}, {**host, "optimizer": optimizer})
    return Memory({"base": CUDA_CONTEXT_GIB, **parts, "optimizer": optimizer}, host)


def resident_gib(config: RunConfig, rank: Memory) -> float:
    """Device memory that a trainer rank keeps between steps, e.g. while colocated engines generate, GiB.

    Args:
        config: Configuration of the run.
        rank: Memory of the rank during a step (`trainer_memory`).
    """
    passing = {"activations"} if keeps_gradients(config) else {"activations", "gradients"}
    return sum(gib for part, gib in rank.device.items() if part not in passing)


def keeps_gradients(config: RunConfig) -> bool:
    """Whether DeepSpeed keeps the device memory of the gradients after a step.

    ZeRO-3 has one flat buffer for them (`grad_partitions_flat_buffer`), and so has its optimizer of bfloat16
    parameters with float32 gradients, which is that of ZeRO-1 (`fp32_groups_gradients_flat`). All others set gradients
    to None when they step.
    """
    trainer = config.trainer
    has_own_optimizer = trainer.zero_stage == 1 and config.model.dtype == "bfloat16" and not trainer.offload_optimizer
    return trainer.zero_stage == 3 or has_own_optimizer


def engine_memory(config: RunConfig, pool: PoolConfig) -> Memory:
    """Memory of one rollout engine: per device, and total main memory."""
    engine, weights, kv_cache = config.rollout.engine, published_gib(config), kv_cache_gib(config, pool)
    num_devices = engine.tensor_parallel_size
    kept = weights if weight_route(config) == "adapters" else 0.0
    if pool.device == "cpu":
        base = BASE_HOST_GIB[engine.type] * num_devices
        buffers = weights * (weight_route(config) in DEVICE_BUFFER_ROUTES)
        parts: dict[Part, float] = {"base": base, "weights": weights + kept, "published": buffers}
        return Memory({}, {**parts, "kv_cache": kv_cache * num_devices})
    asleep: dict[Part, float] = {"weights": 2 * weights * config.cluster.colocated + kept}
    return Memory(
        {**_engine_without_cache(config), "kv_cache": kv_cache},
        {"base": BASE_GPU_HOST_GIB * num_devices, **asleep},
    )


def _engine_without_cache(config: RunConfig) -> dict[Part, float]:
    """Memory of an engine on each of its GPUs, without the KV cache, GiB."""
    engine = config.rollout.engine
    tp, shape = engine.tensor_parallel_size, config.model.shape
    layer = ENGINE_BATCH_TOKENS * _layer_width(config, tp) * DTYPE_BYTES[config.model.dtype]
    return {
        "base": CUDA_CONTEXT_GIB,
        "weights": published_gib(config) / tp,
        "activations": (layer + 3 * 4 * shape.vocab_size * engine.max_num_seqs) / GIB,
        "published": staged_gib(config),
    }


def frozen_memory(
    config: RunConfig, pool: PoolConfig, weights: int | None = None, dtype: DType | None = None
) -> Memory:
    """Memory of one process with a frozen model, which keeps nothing for a backward pass.

    Args:
        config: Of the run.
        pool: Where the process runs.
        weights: Number of its parameters; None: as many as the policy.
        dtype: Its dtype; None: that of the policy.
    """
    shape, tokens, width = config.model.shape, config.trainer.max_group_tokens, DTYPE_BYTES[dtype or config.model.dtype]
    passing = width * tokens * (_layer_width(config, 1) + shape.hidden_size) + _logits_bytes(config, 1)
    held = width * (weights or shape.num_parameters)
    parts: dict[Part, float] = {"weights": held / GIB, "activations": passing / GIB}
    if pool.device == "cpu":
        return Memory({}, {"base": BASE_HOST_GIB["trainer"], **parts})
    return Memory({"base": CUDA_CONTEXT_GIB, **parts}, {"base": BASE_GPU_HOST_GIB})


def adapter_parameters(config: RunConfig) -> int:
    """Number of parameters in all adapters of the policy."""
    lora = config.trainer.lora
    if lora is None:
        return 0
    layers = config.model.shape.linear_layers.items()
    return sum(lora.rank * (rows + columns) for name, (rows, columns) in layers if lora.adapts(name))


def published_gib(config: RunConfig) -> float:
    """Size of one published version of the policy, GiB."""
    return config.model.shape.num_parameters * DTYPE_BYTES[config.model.dtype] / GIB


def trained_state_gib(config: RunConfig) -> float:
    """Size of what a checkpoint keeps of the trainer, GiB: value and two moments of each trained parameter, float32."""
    shape, lora = config.model.shape, config.trainer.lora
    trained = shape.num_parameters if lora is None else adapter_parameters(config)
    return 12 * (trained + shape.num_parameters * config.algorithm.needs_critic) / GIB


def staged_gib(config: RunConfig) -> float:
    """Memory of a staged version on each device of a GPU engine until the swap, GiB."""
    route, streams = weight_route(config), config.weights.staging == "bucket"
    if route == "gather" or (route == "adapters" and streams):  # staged in main memory
        return 0.0
    shard = published_gib(config) / config.rollout.engine.tensor_parallel_size
    return min(shard, BUCKET_BYTES / GIB) if streams else shard


def shared_gib(config: RunConfig) -> float:
    """Size of published versions in shared memory, GiB: one may be written while another is still being read."""
    of_partner = 0.0 if config.partner is None else shared_gib(config.partner_view)
    route = weight_route(config)
    if route == "adapters":
        return 4 * adapter_parameters(config) / GIB + of_partner
    if route in (*DEVICE_BUFFER_ROUTES, "live_parameters"):
        return of_partner
    num_buffers = 1 if route == "gather" else config.weights.num_buffers * num_engine_layouts(config)
    return published_gib(config) * num_buffers + of_partner


def kv_cache_gib(config: RunConfig, pool: PoolConfig) -> float:
    """KV cache of an engine on each of its devices, GiB. For the torch engine, whose cache grows, the upper limit."""
    engine = config.rollout.engine
    if isinstance(engine, VllmEngineConfig):
        stated = engine.cache_gib(pool.device)
        if stated is not None:
            return stated
        taken = sum(_engine_without_cache(config).values())
        if config.cluster.colocated:  # vLLM cannot measure it: a trainer's moments are only allocated in the first step
            taken += resident_gib(config, trainer_memory(config, pool))
        return max(pool.memory_gib * engine.gpu_memory_utilization - taken, 0.0)
    return engine.max_num_seqs * sequence_kv_gib(config)


def sequence_kv_gib(config: RunConfig) -> float:
    """Size of the KV cache of one trajectory of full length, GiB."""
    model = config.model
    return model.max_context_tokens * model.shape.kv_bytes_per_token(DTYPE_BYTES[model.dtype]) / GIB


def _activation_bytes(config: RunConfig) -> float:
    shape, trainer, tp = config.model.shape, config.trainer, config.trainer.tensor_parallel_size
    tokens, layer = trainer.max_tokens_per_micro_batch, _layer_width(config, tp)
    layers = shape.num_layers * layer
    if config.trainer.gradient_checkpointing:
        layers = shape.num_layers * shape.hidden_size + layer
    return tokens * layers * DTYPE_BYTES[config.model.dtype] + _logits_bytes(config, tp)


def _layer_width(config: RunConfig, tp: int) -> float:
    """Number of activations per token of a layer that one of `tp` ranks keeps."""
    shape = config.model.shape
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return 6 * shape.hidden_size + (2 * query + 2 * key + 4 * shape.intermediate_size) / tp


def _logits_bytes(config: RunConfig, tp: int) -> float:
    tokens = config.trainer.max_tokens_per_micro_batch
    vocabulary = config.model.shape.vocab_size / (1 if config.model.shape.tie_word_embeddings else tp)
    return 3 * 4 * vocabulary * min(tokens, LOGITS_CHUNK_TOKENS)


def max_live_trajectories(config: RunConfig) -> int | None:
    """Number of full-length trajectories whose payloads fit in `dataflow.max_live_gib`; None is no limit."""
    if config.dataflow.max_live_gib is None:
        return None
    return int(config.dataflow.max_live_gib * 2**30 / (config.model.max_context_tokens * PAYLOAD_BYTES_PER_TOKEN))
