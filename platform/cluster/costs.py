"""Predicts the step time of a run from its configuration and the data sheets of its accelerators. Pure arithmetic.

Symbols: P parameters, Pa of them used by a token, b bytes of `model.dtype`, L layers, H hidden, A width of all query
heads; R trainer ranks, D of them with different sequences, S sequence-parallel, Z ZeRO stage, M micro-batches of a
rank; E engines over t devices each, n sequences that an engine decodes at once; N answers of a batch with p prompt and
a answer tokens on average, c = p + a/2 the mean context.

    a token in training     F = passes · (2·Pa + 2·(p + a)·A·L)      3 passes, 4 with checkpointing, more by algorithm
    computation             N·(p + a)·F / (R · FLOP/s · 0.35)        0.35: MODEL_FLOPS
    ZeRO traffic            P·b · (3·M if Z = 3, M + 1 if Z = 2, else 2); Z = 3 gathers during computation, FSDP2 too,
                            and adds gradients in float32
    sequence parallel       8 exchanges of H·b per layer and token, or 3·(S − 1) of keys and values
    optimizer               read and write 16 bytes of each trained parameter
    a decode step           max((P·b + n·c·KV) / t / (bytes/s · 0.6), 2·Pa·n / t / (FLOP/s · 0.35)) + TP exchange + 2 ms
    an answer               a / n steps, and its share p / G of prefilling the group's prompt
    publishing              P·b over links, network or main memory, by the route of the weights; then the swap
    a step                  max(training + publishing, generation + swap); their sum if max_staleness = 0 or colocated

All shares and constants are assumptions until `--calibrate RUN` has scaled training, generation and publishing to a
run; no GPU has confirmed any of them. Not modelled: the imbalance of ranks, preemptions, rewards and environments.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from penstock.dataflow.errors import ConfigError
from penstock.platform.cluster.memory import GIB, adapter_parameters, kv_cache_gib
from penstock.platform.cluster.weight_routes import GROUP_ROUTES, num_engine_layouts, weight_route
from penstock.platform.config.schema import RunConfig
from penstock.trainer.backends.sequence_parallel import sequence_parallelism
from penstock.trainer.flops import BF16_FLOPS
from penstock.weights.model_config import DTYPE_BYTES

MODEL_FLOPS = 0.35
"""Share of the FLOP/s that training, prefilling and large decode batches reach."""
MEMORY_SHARE = 0.6
"""Share of the memory bandwidth that decoding and the optimizer reach."""
LINK_SHARE = 0.7
DECODE_STEP_S = 2e-3
"""Scheduling, sampling and launching of a decode step."""
EXCHANGE_S = 10e-6
"""Latency of an exchange between the ranks of an engine."""
MICRO_BATCH_S = 20e-3
TRAINING_STEP_S = 0.3
"""Of a step whatever its size: the batch is collected, packed and sent to the ranks."""
MAIN_MEMORY_BYTES_PER_S = 5e9
"""Of a version through shared memory or gloo."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What the data sheet of an accelerator promises; no program reaches all of it."""

    flops: float
    """Dense bfloat16 FLOP/s."""
    memory_bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """To the other accelerators of its node, in one direction."""


ACCELERATORS = {
    "B200": Accelerator(BF16_FLOPS["B200"], 8.0e12, 900e9),
    "H200": Accelerator(BF16_FLOPS["H200"], 4.8e12, 450e9),
    "H100": Accelerator(BF16_FLOPS["H100"], 3.35e12, 450e9),
    "A100": Accelerator(BF16_FLOPS["A100"], 2.0e12, 300e9),
    "L40S": Accelerator(BF16_FLOPS["L40S"], 0.86e12, 32e9),
    "A10G": Accelerator(BF16_FLOPS["A10G"], 0.6e12, 32e9),
    "L4": Accelerator(BF16_FLOPS["L4"], 0.3e12, 16e9),
}
"""By Ray's label (`cluster.pools.NAME.accelerator_type`); the SXM form where there are several, PCIe without NVLink."""
CPU_SLOT = Accelerator(50e9, 10e9, 5e9)
"""A core. Far off for small models, so a plan for CPUs means nothing without a calibration."""
NETWORK_BYTES_PER_S = 25e9
"""Of an accelerator to those of other nodes: a network card of 200 Gbit/s for each."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean lengths, tokens."""

    prompt_tokens: float
    answer_tokens: float

    @classmethod
    def assumed(cls, config: RunConfig, answer_tokens: float | None = None) -> Workload:
        """Answers of half the longest length, unless given; prompts of half of what the context leaves."""
        longest = config.rollout.sampling.max_new_tokens
        answer_tokens = longest / 2 if answer_tokens is None else answer_tokens
        return cls(max((config.model.max_context_tokens - longest) / 2, 1), answer_tokens)


@dataclass(frozen=True, slots=True)
class Scales:
    """Measured ÷ predicted seconds of a run; 1 without one."""

    train: float = 1.0
    generate: float = 1.0
    publish: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step."""

    step_s: float
    train_s: float
    generate_s: float
    publish_s: float
    """Until the engines have a version, the swap included."""
    trainer_idle: float
    """Share of the step in which the ranks compute nothing."""
    engine_idle: float
    """The same of the engines."""
    bound: Literal["trainer", "engines", "both"]
    """What the other one waits for; `both` if they take turns."""


def predict(config: RunConfig, workload: Workload, scales: Scales = Scales()) -> Prediction:
    """Predict a step of a run.

    Raises:
        ConfigError: If the accelerators of a pool are not known.
    """
    return combine(
        config,
        train_s(config, workload) * scales.train,
        generate_s(config, workload) * scales.generate,
        send_s(config) * scales.publish,
        swap_s(config) * scales.publish,
    )


def combine(config: RunConfig, train_s: float, generate_s: float, send_s: float, swap_s: float) -> Prediction:
    """The step of a run whose parts take so many seconds."""
    takes_turns = config.cluster.colocated or config.dataflow.max_staleness == 0
    trainer_s = train_s + (0.0 if config.weights.overlap else send_s + swap_s)
    engines_s = generate_s + swap_s
    step_s = train_s + send_s + swap_s + generate_s if takes_turns else max(trainer_s, engines_s)
    bound: Literal["trainer", "engines"] = "trainer" if trainer_s >= engines_s else "engines"
    return Prediction(
        step_s=step_s,
        train_s=train_s,
        generate_s=generate_s,
        publish_s=send_s + swap_s,
        trainer_idle=1 - train_s / step_s,
        engine_idle=1 - generate_s / step_s,
        bound="both" if takes_turns else bound,
    )


def accelerator_of(config: RunConfig, name: str) -> Accelerator:
    """Data sheet of the accelerators of a pool.

    Raises:
        ConfigError: If it is not known.
    """
    pool = config.cluster.pools[name]
    if pool.device == "cpu":
        return CPU_SLOT
    # Ray's labels may have a suffix, as in A100-80G.
    known = ACCELERATORS.get((pool.accelerator_type or "").partition("-")[0])
    if known is None:
        raise ConfigError(
            [
                f"cluster.pools.{name}.accelerator_type={pool.accelerator_type}: the cost model needs the FLOP/s and "
                f"the bandwidth of its GPUs, and knows {', '.join(ACCELERATORS)}. Set "
                f"cluster.pools.{name}.accelerator_type=H100, or the nearest of these."
            ]
        )
    return known


def train_s(config: RunConfig, workload: Workload) -> float:
    """Seconds in which the ranks train a batch."""
    trainer, shape, width = config.trainer, config.model.shape, DTYPE_BYTES[config.model.dtype]
    device = accelerator_of(config, config.cluster.trainer_pool)
    tp, sp = trainer.tensor_parallel_size, trainer.sequence_parallel_size
    length = workload.prompt_tokens + workload.answer_tokens
    num_answers = config.dataflow.batch_groups * config.dataflow.group_size
    num_tokens = num_answers * length
    num_replicas = max(trainer.num_ranks // tp, 1)

    algorithm = config.algorithm
    has_own_reference = algorithm.needs_reference and not config.num_frozen("reference")
    passes: float = 3 + trainer.gradient_checkpointing + (algorithm.proximal == "recompute") + has_own_reference
    passes *= 1 + algorithm.needs_critic * config.critic.updates_per_policy_update
    attention = 2 * length * shape.num_heads * shape.head_dim * shape.num_layers
    flops = passes * (2 * shape.active_parameters + attention)
    compute_s = num_tokens * flops / (trainer.num_ranks * device.flops * MODEL_FLOPS)

    in_one = max(trainer.max_group_tokens // length, 1)
    num_micro_batches = ceil(num_answers / max(trainer.data_parallel_size, 1) / in_one)
    weights = shape.num_parameters * width / tp
    trained = weights if trainer.lora is None else adapter_parameters(config) * width
    per_s = _link_bytes_per_s(config, config.cluster.trainer_pool, trainer.num_ranks)
    is_fsdp2 = trainer.backend == "fsdp2"
    stage, num_replicas = (3, trainer.num_shards) if is_fsdp2 else (trainer.zero_stage, num_replicas)
    exchanged = (num_replicas - 1) / num_replicas / per_s
    apart = shape.num_expert_parameters * width * trainer.expert_parallel  # these do not travel, but tokens do
    gather_s = 2 * (weights - apart) * num_micro_batches * exchanged if stage == 3 else 0.0
    if trainer.offload_parameters:  # each rank's part comes from main memory before it is gathered
        gather_s += 2 * weights * num_micro_batches / num_replicas / MAIN_MEMORY_BYTES_PER_S
    reduced = {0: 2, 1: 2, 2: num_micro_batches + 1, 3: num_micro_batches}[stage]
    reduce_s = reduced * (trained if trainer.lora is not None else trained - apart) * exchanged
    if is_fsdp2:
        copies = trainer.fsdp_copies
        reduce_s *= 4 / width
        reduce_s += 8 * trained / width / num_replicas * (copies - 1) / copies / per_s
    # An all-to-all to experts and one back, forward, again if activations are recomputed, and backward.
    of_experts = (
        (4 + 2 * trainer.gradient_checkpointing)
        * shape.num_layers
        * shape.experts_per_token
        * shape.hidden_size
        * width
    )
    experts_s = num_tokens / trainer.num_ranks * of_experts * exchanged * trainer.expert_parallel
    # An all-to-all before and after attention for each of four tensors, forward and backward.
    of_token = 8 * shape.num_layers * shape.hidden_size * width
    of_sequence = of_token * (sp - 1) / sp
    if sequence_parallelism(config.model, trainer) == "context":
        keys_and_values = 2 * shape.num_kv_heads * shape.head_dim * width
        of_sequence = 3 * shape.num_layers * keys_and_values * (sp - 1)
    sequence_s = num_tokens / trainer.num_ranks * of_sequence / per_s
    tensor_s = num_tokens / (trainer.num_ranks / tp) * of_token * (tp - 1) / tp / per_s

    owned = trained / width / (num_replicas if stage else 1)
    bandwidth = MAIN_MEMORY_BYTES_PER_S if trainer.offload_optimizer else device.memory_bytes_per_s * MEMORY_SHARE
    optimizer_s = 2 * 16 * owned / bandwidth
    fixed_s = TRAINING_STEP_S + MICRO_BATCH_S * num_micro_batches
    return max(compute_s, gather_s) + reduce_s + experts_s + sequence_s + tensor_s + optimizer_s + fixed_s


def generate_s(config: RunConfig, workload: Workload) -> float:
    """Seconds in which all engines together sample a batch."""
    num_answers = config.dataflow.batch_groups * config.dataflow.group_size
    per_s, longest_s = 0.0, 0.0
    for view in config.rollout_views:
        answer_s, step_s = _answer_s(view, workload)
        per_s += view.rollout.num_engines / answer_s
        longest_s = max(longest_s, step_s * config.rollout.sampling.max_new_tokens)
    busy_s = num_answers / per_s
    return max(busy_s, longest_s) if config.dataflow.max_staleness == 0 else busy_s


def _answer_s(config: RunConfig, workload: Workload) -> tuple[float, float]:
    """Seconds of an engine for one answer, and of its decode step, on the pool that `config` is the view of."""
    flow, engine, shape = config.dataflow, config.rollout.engine, config.model.shape
    width, tp, pool = DTYPE_BYTES[config.model.dtype], engine.tensor_parallel_size, config.cluster.rollout_pool
    device = accelerator_of(config, pool)
    live = (flow.max_staleness + 1) * flow.batch_groups * flow.group_size / config.num_engines
    num_tokens = workload.prompt_tokens + workload.answer_tokens / 2
    kv_of_sequence = shape.cache_bytes(num_tokens, engine.cache_bytes(config.model.dtype))
    fitting = kv_cache_gib(config, config.cluster.pools[pool]) * GIB * tp / kv_of_sequence
    running = max(min(engine.max_num_seqs, live, fitting), 1.0)
    read = shape.num_parameters * width + running * kv_of_sequence
    memory_s = read / tp / (device.memory_bytes_per_s * MEMORY_SHARE)
    compute_s = 2 * shape.active_parameters * running / tp / (device.flops * MODEL_FLOPS)
    sent = 2 * running * shape.hidden_size * width * (tp - 1) / tp / (device.link_bytes_per_s * LINK_SHARE)
    exchange_s = 2 * shape.num_layers * (sent + EXCHANGE_S * (tp > 1))
    step_s = max(memory_s, compute_s) + exchange_s + DECODE_STEP_S
    prefill_s = workload.prompt_tokens / flow.group_size * 2 * shape.active_parameters / tp
    return workload.answer_tokens / running * step_s + prefill_s / (device.flops * MODEL_FLOPS), step_s


def send_s(config: RunConfig) -> float:
    """Seconds until a version is where the engines can fetch it."""
    route, weights = weight_route(config), config.model.shape.num_parameters * DTYPE_BYTES[config.model.dtype]
    if route == "adapters":
        return 4 * adapter_parameters(config) / MAIN_MEMORY_BYTES_PER_S
    if route == "cuda_ipc":  # every engine has a buffer of its own
        device = accelerator_of(config, config.cluster.trainer_pool)
        return config.num_engines * weights / config.trainer.num_ranks / (device.link_bytes_per_s * LINK_SHARE)
    if route in GROUP_ROUTES and route != "node_receivers":  # sent once, and relayed by the engines
        return weights / (NETWORK_BYTES_PER_S * LINK_SHARE)
    return weights * num_engine_layouts(config) / MAIN_MEMORY_BYTES_PER_S


def swap_s(config: RunConfig) -> float:
    """Seconds for which the slowest engine is frozen: its weights are read and written."""
    weights = config.model.shape.num_parameters * DTYPE_BYTES[config.model.dtype]
    return max(
        2 * weights / view.rollout.engine.tensor_parallel_size
        / (accelerator_of(config, view.cluster.rollout_pool).memory_bytes_per_s * MEMORY_SHARE)
        for view in config.rollout_views
    )  # fmt: skip


def _link_bytes_per_s(config: RunConfig, pool: str, num_devices: int) -> float:
    """Bandwidth between devices of a pool; that of the network if they are on several nodes."""
    per_node = config.cluster.pools[pool].devices_per_node
    device = accelerator_of(config, pool)
    is_one_node = per_node is None or num_devices <= per_node
    return (device.link_bytes_per_s if is_one_node else NETWORK_BYTES_PER_S) * LINK_SHARE
