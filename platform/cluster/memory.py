"""Estimates the memory of each process from the model shape in the configuration, without loading anything.

P parameters, b bytes of `model.dtype`, R trainer ranks, Z ZeRO stage, T tokens of a micro-batch, L layers, H hidden,
Q and K query and key/value width, I intermediate, V vocabulary. Under tensor parallelism of size t, P is the number of
parameters of one rank (all but the embeddings are divided by t), and R, Q, K, I and the V of an untied head are
divided by t.

    trainer weights      P·b          / R if Z = 3; in main memory with offload_parameters
    gradients            bfloat16: 2·P at Z = 0, 4·P at Z = 1, 4·P / R at Z ≥ 2; float32: 4·P, / R at Z ≥ 2;
                         and P·b of a bucket of at most 5e7 elements at Z = 3
    master weights       4·P          / R if Z ≥ 1; none for float32 at Z = 0
    states of AdamW      8·P, with moments_dtype=bfloat16 4·P; of Muon 4·P of hidden matrices; / R if Z ≥ 1
    passing              the most of these three, since they follow one another:
      backward           activations; at Z = 1 in bfloat16 also 2·P of gradients; at Z = 3 also P·b of gathered layers
                         (at most 1e9 parameters); at Z ≥ 2 also buckets
      all-reduce         R > 1: P·b at Z = 0 (at most 5e8 parameters), 4·P at Z = 1 in bfloat16
      step of AdamW      4·p on a GPU, of p parameters that are updated at once: P / R, at most 1e9 at Z = 3; and 4·p of
                         gradients, where they are not float32 and flat already
                         with moments_dtype=bfloat16 20 bytes of 4e6 elements in place of 4·p; of Muon 12 bytes of
                         the largest matrix, or 4·p of what is none
    activations          T·b·(L·layer + 5H) and the head; with checkpointing L·H, or T·b·(L·H + layer + 2H + 2I);
                         a layer keeps 8H + 4Q + 4K + 4I, in float32 6H, with adapters 2H less; where s ranks split
                         sequences by context, while one layer computes also T·b·s·8K of keys and values of the row
    head                 V·H·b of its gradient, and one tile of logits: T·v·(4 + 2b) + T·H·4, v ≤ 8192
    between steps        a rank keeps weights and optimizer, and its gradients if DeepSpeed never frees their buffer: at
                         Z = 3, and at Z = 1 in bfloat16 without offload_optimizer
    engine               P·b / tp + KV cache, on each of its tp devices; P·b / tp more for a staged version
                         (64 MiB with weights.staging=bucket, none with weights.transport=gather);
                         activations 2048·b·(one layer / tp) + 3·4·V·max_num_seqs
    engine, asleep       its context; 2·P·b of main memory: torch rounds each pinned block up to a power of two
    FSDP2                master weights and moments 12·P / S over the S ranks of a copy, weights P·b / S only where they
                         are frozen; gradients 4·P / S, none between steps; in the backward pass b of the parameters
                         outside layers, and of one layer (the head's moment) or of three, and of one layer b + 4 for
                         its gradients; then b + 4 for those outside; 4·P / S in a step on a GPU
    before an update     P·b of main memory, / R if Z = 3: the policy before the first of several updates of a batch;
                         policy and critic before those of each batch; each of two policies before its update
    critic               as a second policy; only one of them has activations at a time
    published            P·b in shared memory, twice unless weights.transport=gather, for each layout of engines; or
                         P·b / tp on each device of an engine, also while it sleeps (weights.transport=cuda_ipc)
    loading              P·b of main memory on each rank with Z ≤ 2, until it is on its GPU
    with adapters        of A parameters: gradients, master weights and moments for A only; 4·A in shared memory, and
                         P·b of main memory per engine; if full weights are sent, P·b while a version is merged
    reference, teacher   P·b (of that model) + T·b·(5H + 3I); with offload also P·b of main memory, and none of both on
                         the device while the trainer steps
    reward with a pool   the same; 2·P on a GPU, 4·P on a CPU
    base                 process without weights (measured on CPU; the CUDA context on GPU)

Sources, measurements and a table: docs/concepts/memory.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from penstock.dataflow.trajectory import dtype_for
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, num_engine_layouts, weight_route
from penstock.platform.config.pools import PoolConfig
from penstock.platform.config.schema import RunConfig
from penstock.rollout.config import VllmEngineConfig
from penstock.trainer.backends.sequence_parallel import sequence_parallelism
from penstock.trainer.config import MOMENTS_PIECE_ELEMENTS, ZERO_BUCKET_ELEMENTS, OptimizerConfig
from penstock.weights.model_config import DTYPE_BYTES, DType
from penstock.weights.planner.plan import BUCKET_BYTES

GIB = 1 << 30
ENGINE_BATCH_TOKENS = {160: 16384, 70: 8192, 0: 2048}
"""Memory of a GPU from which on, GiB -> most tokens of one step of a vLLM engine, as in `vllm serve`; of an A100 2,048
whatever its memory, which is not told apart here.
"""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 gathers at most, DeepSpeed's default (`stage3_max_live_parameters`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""Parameters of a rank that ZeRO-3 updates at once, its default (`sub_group_size`)."""
ALL_REDUCE_ELEMENTS = 500_000_000
"""Gradients that ZeRO-0 reduces at once, a constant of `DeepSpeedEngine.buffered_allreduce_fallback`."""
GPU_TILE = (16384, 8192)
CPU_TILE = (512, 1024)
"""Tokens and words of the largest tile of logits (kernels/portable/logprob.py)."""
GPU_GATHERED, CPU_GATHERED = 1 << 25, 1 << 19
"""Elements of the rows of the head that are gathered at once (kernels/portable/truncated_logprob.py)."""

PAYLOAD_BYTES_PER_TOKEN = 16
"""Of a stored trajectory without alternatives and routes: ids 4, loss mask 1, behavior logprobs 4, text and rewards
about 7."""
BASE_HOST_GIB = {"driver": 1.0, "trainer": 0.6, "vllm": 1.85, "torch": 0.4, "reward": 0.15}
"""Resident memory of a process after its imports, GiB. `driver` includes Ray's own processes."""
BASE_GPU_HOST_GIB = 3.0
"""Host memory of a process that uses a GPU, GiB."""
CUDA_CONTEXT_GIB = 1.0

Part = Literal["base", "weights", "gradients", "optimizer", "activations", "kv_cache", "published", "checkpoint"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process by purpose, GiB."""

    device: dict[Part, float]
    """Memory on its accelerator; empty on a CPU pool."""
    host: dict[Part, float]
    """Main memory."""

    @property
    def device_gib(self) -> float:
        return sum(self.device.values())

    @property
    def host_gib(self) -> float:
        return sum(self.host.values())


def trainer_memory(config: RunConfig, pool: PoolConfig, *, has_partner: bool = False) -> Memory:
    """Memory of one trainer rank; `has_partner`: of one of two policies.

    `gradients` are what a step begins with or DeepSpeed never frees; `activations` what is most at one moment of a step
    beside weights, optimizer and those: of the backward pass, of an all-reduce, or of AdamW.
    """
    shape, width, on_gpu = config.model.shape, DTYPE_BYTES[config.model.dtype], pool.device == "gpu"
    parameters = _parameters_of_rank(config)
    stage, ranks, lora = config.trainer.zero_stage, _replicas(config), config.trainer.lora
    trained = parameters if lora is None else adapter_parameters(config)
    is_fsdp2 = config.trainer.backend == "fsdp2"
    stage, ranks = (3, config.trainer.num_shards) if is_fsdp2 else (stage, ranks)
    models = [_training(config, config.trainer.optimizer, trained, on_gpu=on_gpu)]
    if config.algorithm.needs_critic:
        models.append(_training(config, config.critic.optimizer, parameters, on_gpu=on_gpu))
    merged = parameters if lora is not None and weight_route(config) != "adapters" else 0
    # The weights of FSDP2 are the master weights, which count as the optimizer's, but those under adapters.
    num_weights = (lora is not None) if is_fsdp2 else len(models)
    weights = num_weights * parameters * width / (ranks if stage == 3 else 1) / GIB
    held = weights + (len(models) - num_weights) * parameters * 4 / ranks / GIB
    parts: dict[Part, float] = {
        "weights": weights,
        # A critic is updated after the policy, whose gradients are gone by then, unless they have a buffer.
        "gradients": (sum if keeps_gradients(config) else max)(one.gradients for one in models) / GIB,
        "activations": max(one.passing for one in models) / GIB,
        "published": merged * width / (ranks if stage == 3 else 1) / GIB,
    }
    optimizer = sum(one.optimizer for one in models) / GIB
    # A rank's copy of its share of the trained state, while a checkpoint is written.
    takes_any = config.checkpoint.every_steps or config.checkpoint.every_minutes
    is_kept = config.algorithm.updates_per_batch > 1 or config.algorithm.needs_critic or has_partner
    before_updates = held if is_kept else 0.0
    copied: dict[Part, float] = {
        "checkpoint": before_updates + (trained_state_gib(config) / config.trainer.num_ranks if takes_any else 0.0)
    }
    if pool.device == "cpu":
        return Memory({}, {"base": BASE_HOST_GIB["trainer"], **parts, "optimizer": optimizer, **copied})
    is_loaded_whole = stage < 3 or is_fsdp2 or config.trainer.tensor_parallel_size > 1
    host: dict[Part, float] = {"base": BASE_GPU_HOST_GIB, **copied}
    host["weights"] = shape.num_parameters * width * is_loaded_whole / GIB
    device: dict[Part, float] = {"base": CUDA_CONTEXT_GIB, **parts}
    if config.trainer.offload_parameters:
        host["weights"] += device.pop("weights")
    (host if config.trainer.offload_optimizer else device)["optimizer"] = optimizer
    return Memory(device, host)


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


class _Training(NamedTuple):
    """Bytes of one rank for the training of one model, without its weights."""

    optimizer: float
    """Master weights and states of the optimizer."""
    gradients: float
    """What a step begins with or DeepSpeed never frees."""
    passing: float
    """Largest sum of everything else at one moment of a step."""


def _training(config: RunConfig, kept: OptimizerConfig, trained: float, *, on_gpu: bool) -> _Training:
    """What DeepSpeed allocates for `trained` parameters of one rank; the lines are in docs/concepts/memory.md."""
    trainer, shape = config.trainer, config.model.shape
    if trainer.backend == "fsdp2":
        return _fsdp2_training(config, kept, trained, on_gpu=on_gpu)
    stage, ranks, width = trainer.zero_stage, _replicas(config), DTYPE_BYTES[config.model.dtype]
    is_half = config.model.dtype == "bfloat16"
    share = trained / ranks if stage else trained
    optimizer = 4 * share * (is_half or stage > 0) + _state_bytes(config, kept, trained) / (ranks if stage else 1)
    updated = min(share, SUB_GROUP_ELEMENTS) if stage == 3 else share
    adam = _step_bytes(config, kept, updated, on_gpu=on_gpu)
    if trainer.offload_optimizer:  # also gradients and updated weights, and what AdamW on a CPU takes
        optimizer += (4 + (4 if stage == 3 else width)) * share + _step_bytes(config, kept, updated, on_gpu=False)
        adam = 0
    backward = _activation_bytes(config, on_gpu=on_gpu, trains_head=trainer.lora is None)
    bucket = width * min(ZERO_BUCKET_ELEMENTS, shape.num_parameters)
    reduced = 0.0
    if stage == 0:
        gradients = width * trained
        reduced = width * min(trained, ALL_REDUCE_ELEMENTS) * (ranks > 1)
        step = adam + 4 * trained * is_half
    elif stage == 1 and is_half and not trainer.offload_optimizer:
        gradients = 4 * trained
        backward += width * trained
        reduced = 2 * width * trained
        step = width * trained + adam
    elif stage < 3:
        gradients = 4 * (trained if stage == 1 else share)
        backward += 2 * min(bucket, width * trained)
        # Gradients of tensors that are larger than a bucket, which the embedding is, are kept until the step.
        embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        large = width * min(embeddings, trained) if stage == 2 else 0
        step = large + (adam if is_half else max(8 * share, 4 * share + adam) - gradients)
    else:
        gradients = bucket + (0 if trainer.offload_optimizer else 4 * share)
        backward += width * min(_parameters_of_rank(config), LIVE_PARAMETERS) + 2 * min(bucket, width * trained)
        step = 0 if trainer.offload_optimizer else 4 * updated + adam
    return _Training(optimizer, gradients, max(backward, reduced, step))


def _by_adamw(config: RunConfig, optimizer: OptimizerConfig, trained: float) -> float:
    """Of so many trained parameters those that AdamW updates: beside Muon embeddings and head; norms and biases,
    below 0.1 %, are left out.
    """
    shape = config.model.shape
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    return trained if optimizer.muon is None else embeddings


def _state_bytes(config: RunConfig, optimizer: OptimizerConfig, trained: float) -> float:
    """States of the optimizer of so many trained parameters."""
    others = _by_adamw(config, optimizer, trained)
    of_other, of_matrix = (
        sum(DTYPE_BYTES[dtype] for dtype in optimizer.states(is_matrix=is_matrix).values())
        for is_matrix in (False, True)
    )
    return others * of_other + (trained - others) * of_matrix


def _step_bytes(config: RunConfig, optimizer: OptimizerConfig, updated: float, *, on_gpu: bool) -> float:
    """What the optimizer takes for a moment while it updates so many parameters."""
    others, shape = _by_adamw(config, optimizer, updated), config.model.shape
    # Roots of second moments: of all tensors on a GPU (foreach), of one after the other on a CPU, where ZeRO has one.
    of_adamw = 4 * others if on_gpu else 8 * others * bool(config.trainer.zero_stage)
    if optimizer.moments_dtype == "float32" and optimizer.muon is None:
        return of_adamw
    matrices = {**shape.linear_layers, **shape.expert_weights, "lm_head": (0, 0)}
    largest = max(rows * columns for rows, columns in matrices.values())
    if optimizer.moments_dtype == "bfloat16":  # in pieces of a tensor, which of ZeRO is all parameters
        tensor = others if config.trainer.zero_stage else max(largest, shape.vocab_size * shape.hidden_size)
        of_adamw = 20 * min(others, tensor, MOMENTS_PIECE_ELEMENTS)
    return of_adamw if optimizer.muon is None else max(of_adamw, 12 * largest)


def _fsdp2_training(config: RunConfig, optimizer: OptimizerConfig, trained: float, *, on_gpu: bool) -> _Training:
    """What torch allocates for `trained` parameters of one rank under `fully_shard`."""
    trainer, shape, width = config.trainer, config.model.shape, DTYPE_BYTES[config.model.dtype]
    share, num_parameters = trained / trainer.num_shards, shape.num_parameters
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    layer, is_whole = (num_parameters - outside) / shape.num_layers, trained >= num_parameters
    if trainer.expert_parallel:  # a rank never has those of the others
        layer -= shape.num_expert_parameters / shape.num_layers * (1 - 1 / trainer.num_shards)
    trained_of_layer, trained_outside = (layer, outside) if is_whole else (trained / shape.num_layers, 0)
    head, in_layer = _activation_moments(config, on_gpu=on_gpu, trains_head=is_whole)
    head += width * (outside + layer)
    in_layer += width * (outside + 3 * layer) + (width + 4) * trained_of_layer
    backward = max(head, in_layer, (width + 4) * trained_outside)
    step = 4 * share if on_gpu else 8 * trained_outside / trainer.num_shards
    states, gradients = 4 * share + _state_bytes(config, optimizer, share), 4 * share
    if optimizer.moments_dtype == "bfloat16":
        step = _step_bytes(config, optimizer, share, on_gpu=on_gpu)
    if trainer.offload_optimizer:  # with the gradients, and what AdamW on a CPU takes; but not sums between copies
        between_copies = gradients * (trainer.fsdp_copies > 1)
        states, gradients, step = states + gradients + 8 * trained_outside / trainer.num_shards, between_copies, 0
    return _Training(states, gradients, max(backward, step))


def _replicas(config: RunConfig) -> int:
    """Ranks over which ZeRO partitions."""
    return max(1, config.trainer.num_ranks // config.trainer.tensor_parallel_size)


def _parameters_of_rank(config: RunConfig) -> float:
    """Parameters of one of t tensor-parallel ranks, before ZeRO partitions them."""
    shape = config.model.shape
    embeddings = shape.vocab_size * shape.hidden_size  # not split, whole on every rank
    return embeddings + (shape.num_parameters - embeddings) / config.trainer.tensor_parallel_size


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
        {**_engine_without_cache(config, pool), "kv_cache": kv_cache},
        {"base": BASE_GPU_HOST_GIB * num_devices, **asleep},
    )


def _engine_without_cache(config: RunConfig, pool: PoolConfig) -> dict[Part, float]:
    """Memory of an engine on each of its GPUs, without the KV cache, GiB."""
    engine = config.rollout.engine
    tp, shape = engine.tensor_parallel_size, config.model.shape
    batch_tokens = next(tokens for gib, tokens in ENGINE_BATCH_TOKENS.items() if pool.limit_gib >= gib)
    if isinstance(engine, VllmEngineConfig) and isinstance(own := engine.args.get("max_num_batched_tokens"), int):
        batch_tokens = own
    layer = batch_tokens * _layer_width(config, tp) * DTYPE_BYTES[config.model.dtype]
    return {
        "base": CUDA_CONTEXT_GIB,
        "weights": published_gib(config) / tp,
        "activations": (layer + 3 * 4 * shape.vocab_size * engine.max_num_seqs) / GIB,
        "published": staged_gib(config),
    }


def frozen_memory(
    config: RunConfig,
    pool: PoolConfig,
    weights: int | None = None,
    dtype: DType | None = None,
    *,
    is_offloaded: bool = False,
) -> Memory:
    """Memory of one process with a frozen model, which keeps nothing for a backward pass.

    Args:
        config: Of the run.
        pool: Where the process runs.
        weights: Number of its parameters; None: as many as the policy.
        dtype: Its dtype; None: that of the policy.
        is_offloaded: Whether main memory holds a copy from which the device gets its own.
    """
    shape, tokens, width = config.model.shape, config.trainer.max_group_tokens, DTYPE_BYTES[dtype or config.model.dtype]
    layer = max(3 * shape.intermediate_size, 4 * shape.head_dim * (shape.num_heads + shape.num_kv_heads))
    passing = width * tokens * (5 * shape.hidden_size + layer)
    held = width * (weights or shape.num_parameters)
    parts: dict[Part, float] = {"weights": held / GIB, "activations": passing / GIB}
    if pool.device == "cpu":
        return Memory({}, {"base": BASE_HOST_GIB["trainer"], **parts})
    host: dict[Part, float] = {"base": BASE_GPU_HOST_GIB}
    if is_offloaded:
        host["weights"] = held / GIB
    return Memory({"base": CUDA_CONTEXT_GIB, **parts}, host)


def adapter_parameters(config: RunConfig) -> int:
    """Number of parameters in all adapters of the policy."""
    lora = config.trainer.lora
    if lora is None:
        return 0
    shape = config.model.shape
    of_layers = sum(lora.rank * sum(size) for name, size in shape.linear_layers.items() if lora.adapts(name))
    of_expert = sum(lora.rank * sum(size) for name, size in shape.expert_weights.items() if lora.adapts_experts(name))
    return of_layers + shape.num_experts * of_expert


def published_gib(config: RunConfig) -> float:
    """Size of one published version of the policy, GiB."""
    return config.model.shape.num_parameters * DTYPE_BYTES[config.model.dtype] / GIB


def trained_state_gib(config: RunConfig) -> float:
    """Size of what a checkpoint keeps of the trainer, GiB: value and optimizer states of each trained parameter."""
    shape, lora = config.model.shape, config.trainer.lora
    trained = shape.num_parameters if lora is None else adapter_parameters(config)
    kept = 4 * trained + _state_bytes(config, config.trainer.optimizer, trained)
    if config.algorithm.needs_critic:
        kept += 4 * shape.num_parameters + _state_bytes(config, config.critic.optimizer, shape.num_parameters)
    return kept / GIB


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
        taken = sum(_engine_without_cache(config, pool).values())
        if config.cluster.colocated:  # vLLM cannot measure it: a trainer's moments are only allocated in the first step
            taken += resident_gib(config, trainer_memory(config, pool))
            taken += frozen_memory(config, pool).device_gib * config.takes_turns("reference")
            of_teacher = frozen_memory(config, pool, config.teacher.num_parameters).device_gib
            taken += of_teacher * config.takes_turns("teacher")
        return max(pool.limit_gib * engine.gpu_memory_utilization - taken, 0.0)
    return engine.max_num_seqs * sequence_kv_gib(config)


def sequence_kv_gib(config: RunConfig) -> float:
    """Size of the KV cache of one trajectory of full length, GiB."""
    model, element = config.model, config.rollout.engine.cache_bytes(config.model.dtype)
    return model.shape.cache_bytes(model.max_context_tokens, element) / GIB


def round_up(gib: float) -> float:
    """To two digits after the point, for a setting."""
    return ceil(100 * gib) / 100


def _activation_bytes(config: RunConfig, *, on_gpu: bool, trains_head: bool) -> float:
    """Most that forward and backward of one micro-batch keep, beside gradients of weights but the head's."""
    return max(_activation_moments(config, on_gpu=on_gpu, trains_head=trains_head))


def _activation_moments(config: RunConfig, *, on_gpu: bool, trains_head: bool) -> tuple[float, float]:
    """The same while the head computes its gradient, and while the last layer does."""
    shape, trainer, tp = config.model.shape, config.trainer, config.trainer.tensor_parallel_size
    width, tokens = DTYPE_BYTES[config.model.dtype], trainer.max_tokens_per_micro_batch
    hidden, layer = shape.hidden_size, _layer_width(config, tp)
    kept = shape.num_layers * (hidden if trainer.gradient_checkpointing else layer)
    # Within the backward pass of a layer: gradients of the MLP's two products and of the residual stream.
    of_layer = layer * trainer.gradient_checkpointing + 2 * hidden + 2 * shape.intermediate_size / tp
    head = width * tokens * (kept + 5 * hidden) + _head_bytes(config, on_gpu=on_gpu, is_trained=trains_head)
    if sequence_parallelism(config.model, trainer) == "context":
        # Keys and values of the whole row, those of each of its sequences, and the gradients of both.
        of_layer += 4 * trainer.sequence_parallel_size * 2 * shape.num_kv_heads * shape.head_dim
    return head, width * tokens * (kept + of_layer)


def _layer_width(config: RunConfig, tp: int) -> float:
    """Number of activations per token of a layer that one of `tp` ranks keeps for its backward pass."""
    shape = config.model.shape
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Each of two norms keeps its input in float32, its result, and what it multiplies with a weight that is trained.
    norms = (8 if config.model.dtype == "bfloat16" else 6) - 2 * (config.trainer.lora is not None)
    norms_of_heads = (3 if config.model.dtype == "bfloat16" else 2) * (query + key) * shape.qk_norm
    return norms * shape.hidden_size + (norms_of_heads + 4 * query + 4 * key + 4 * shape.intermediate_size) / tp


def _head_bytes(config: RunConfig, *, on_gpu: bool, is_trained: bool) -> float:
    """Of kernels/linear_logprob.py in backward: gradients of the weight and of hidden states, one tile of logits.

    With truncated sampling also the gradient of those rows of the weight that occur, in float32.
    """
    shape, trainer, width = config.model.shape, config.trainer, DTYPE_BYTES[config.model.dtype]
    rows = shape.vocab_size / (1 if shape.tie_word_embeddings else trainer.tensor_parallel_size)
    max_tokens, max_words = GPU_TILE if on_gpu else CPU_TILE
    words, tokens = min(max_words, rows), trainer.max_tokens_per_micro_batch
    if config.rollout.sampling.top_k:  # kernels/portable/truncated_logprob.py
        gathered, hidden = tokens * config.rollout.sampling.top_k, 4 * tokens * shape.hidden_size
        chunk = min(gathered * shape.hidden_size, GPU_GATHERED if on_gpu else CPU_GATHERED)
        used = min(rows, gathered) * shape.hidden_size * is_trained
        weight = width * rows * shape.hidden_size * is_trained
        moments = (
            12 * chunk,  # forward: two operands and their product
            (width + 4) * chunk + 4 * used + hidden,
            weight + (4 + width * (width < 4)) * used + hidden,  # the sum is converted
        )
        return 48 * gathered + max(moments)  # ids, places, logits and their gradients
    # Of several tiles, the gradient of one is dropped when that of the next is there.
    has_several = rows > max_words or tokens > max_tokens
    tile = min(tokens, max_tokens) * words * (4 + width * (1 + has_several))
    weight = (width * rows + 4 * words) * shape.hidden_size * is_trained
    return tile + weight + 4 * tokens * shape.hidden_size


def max_live_trajectories(config: RunConfig) -> int | None:
    """Number of full-length trajectories whose payloads fit in `dataflow.max_live_gib`; None is no limit."""
    if config.dataflow.max_live_gib is None:
        return None
    return int(config.dataflow.max_live_gib * 2**30 / payload_bytes(config))


def payload_bytes(config: RunConfig) -> int:
    """Size of a stored trajectory that fills the context; each sampled token has up to `top_k` − 1 alternatives, and
    every token the experts of each layer.
    """
    shape = config.model.shape
    routes = 0
    if config.algorithm.routing == "replay" and shape.num_experts:
        routes = shape.num_layers * shape.experts_per_token * dtype_for(shape.num_experts).itemsize
    return config.model.max_context_tokens * (PAYLOAD_BYTES_PER_TOKEN + 4 * config.rollout.sampling.top_k + routes)
