"""Trainer configurations that must give the same numbers, and the program of one rank that computes them.

    sys.argv[1:]: FORM RANK PORT FOLDER WORLD TENSOR_PARALLEL SEQUENCE_PARALLEL CONTEXT

`FORM` is `short`, or `long` for `LONG_CASES` too.

Each rank runs all cases of its kind of world, since starting one costs more than training in it.
"""

from __future__ import annotations

import dataclasses
import gc
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.ports import StepReport
from penstock.dataflow.trajectory import GroupPayload, Routes, Trajectory, dtype_for, unknown_routes
from penstock.dataflow.versions import Span
from penstock.trainer.algorithms.advantages import GaeConfig
from penstock.trainer.backends.base import Backend
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.config import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    MuonConfig,
    OptimizerConfig,
    TrainerConfig,
)
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.policy_trainer import HeldWeights, PolicyTrainer, on_cpu
from penstock.trainer.spec import TrainerSpec
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.model_config import Attention, ModelConfig, ModelShape
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter, read_shard
from tests.algorithms import algorithm_config
from tests.layouts import read, torch_layout
from tests.tiny_policy import SPECIAL_TOKENS, tiny_shape

VOCAB = 24
TIED = tiny_shape(VOCAB)
UNTIED = TIED.model_copy(update={"tie_word_embeddings": False, "attention_bias": True, "vocab_size": VOCAB + 1})
"""Qwen2 in place of Qwen3. An odd vocabulary: tensor-parallel ranks get unequal parts of the head."""
MIXTURE = TIED.model_copy(update={"num_experts": 4, "expert_size": 32})
"""Two of four experts for each token."""
ENGINES = (("torch", 1), ("vllm", 1), ("vllm", 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """One trainer configuration; frozen, so that it is a dictionary key."""

    backend: str = "deepspeed"
    world_size: int = 1
    zero_stage: int = 0
    max_tokens: int = 64
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    # ε of AdamW far above the gradient makes an update proportional to it, so weights compare gradients.
    adam_epsilon: float = 1e-8
    streamed: bool = False
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    is_context: bool = False
    is_tied: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False
    updates: str = "one"
    has_adapters: bool = False
    has_early_logprobs: bool = False
    is_varlen: bool = False
    is_compiled: bool = False
    optimizer: str = "adamw"
    fsdp_copies: int = 1
    has_experts: bool = False
    is_expert_parallel: bool = False

    @property
    def shape(self) -> ModelShape:
        return MIXTURE if self.has_experts else TIED if self.is_tied else UNTIED

    @property
    def attention(self) -> Attention:
        """That of a run, unless `is_varlen`."""
        is_default = self.dtype == "bfloat16" or self.sequence_parallel > 1
        return "varlen" if is_default or self.is_varlen else "sdpa"

    @property
    def policy(self) -> str:
        return "mixture" if self.has_experts else "policy" if self.is_tied else "untied"

    @property
    def engines(self) -> tuple[tuple[str, int], ...]:
        """What is published to: kind and tensor-parallel size."""
        return ENGINES[:1] if self.has_experts else ENGINES

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """What processes are started for: DeepSpeed's groups stay as they are for the life of a process."""
        return self.world_size, self.tensor_parallel, self.sequence_parallel, int(self.is_context)


SEVERAL = algorithm_config(proximal="recompute", mini_batches=2, epochs=2)
ALGORITHMS = {
    "one": AlgorithmConfig(),
    "several": SEVERAL,
    "several with a critic": SEVERAL.model_copy(update={"advantage": GaeConfig()}),
    "with a reference": algorithm_config(kl_coefficient=0.1),
}
LORA = LoraConfig(rank=3, alpha=5, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
LORA_OF_ATTENTION = LORA.model_copy(update={"targets": ("q_proj", "v_proj", "o_proj")})
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    # It computes in bfloat16: the last bits of a gradient can change an element of a step by 1 to 2 % of the rate.
    "muon": {"muon": MuonConfig(), "lr": 2e-5},
    "bfloat16 moments": {"moments_dtype": "bfloat16"},
}
EXPERT_PARALLEL = {"has_experts": True, "is_expert_parallel": True}
REFERENCE = Case(backend="torch")
CASES = [
    Case(zero_stage=0),
    Case(zero_stage=2, dtype="bfloat16"),  # the recipe for one GPU
    Case(streamed=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=2, max_tokens=40, adam_epsilon=1.0, is_varlen=True),
    Case(world_size=2, zero_stage=1, has_adapters=True, streamed=True, is_tied=False),
    Case(world_size=2, zero_stage=0, optimizer="muon"),
    Case("fsdp2", world_size=2, max_tokens=40, is_varlen=True),
    Case("fsdp2", world_size=2, streamed=True, adam_epsilon=1.0, is_tied=False),
    Case("fsdp2", world_size=2, has_adapters=True, gradient_checkpointing=True, updates="with a reference"),
    Case("fsdp2", world_size=2, max_tokens=40, adam_epsilon=1.0, updates="several with a critic"),
    Case("fsdp2", world_size=2, sequence_parallel=2, is_context=True, adam_epsilon=1.0),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, adam_epsilon=1.0, max_tokens=40, gradient_checkpointing=True),
    # ZeRO-3 last: while one of its models lives, transformers loads every model partitioned.
    Case(world_size=2, zero_stage=3, dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, has_adapters=True, gradient_checkpointing=True, is_tied=False),
    Case(world_size=2, zero_stage=3, max_tokens=40, adam_epsilon=1.0, updates="several with a critic"),
    Case(
        world_size=2,
        zero_stage=3,
        max_tokens=40,
        adam_epsilon=1.0,
        updates="several with a critic",
        has_early_logprobs=True,
    ),
]
"""On one and two ranks."""
LONG_CASES = [
    Case(zero_stage=2),
    Case(zero_stage=2, adam_epsilon=1.0, is_varlen=True),
    Case(world_size=2, zero_stage=0, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=2, optimizer="bfloat16 moments"),
    Case("fsdp2", adam_epsilon=1.0),
    Case("fsdp2", world_size=2, dtype="bfloat16"),
    Case("fsdp2", world_size=2, optimizer="bfloat16 moments"),
    Case("fsdp2", world_size=2, has_experts=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=3, streamed=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=3, offload_parameters=True, adam_epsilon=1.0),
    Case(world_size=2, sequence_parallel=2, is_context=True, zero_stage=2, adam_epsilon=1.0),
    Case(zero_stage=0, optimizer="muon", updates="several with a critic"),
    Case(zero_stage=0, optimizer="muon", dtype="bfloat16"),
    Case(world_size=2, zero_stage=0, optimizer="muon", streamed=True, is_tied=False),
    Case(world_size=4, zero_stage=0, optimizer="muon"),
    Case(sequence_parallel=2, world_size=4, zero_stage=0, optimizer="muon"),
    Case(world_size=2, zero_stage=0, optimizer="bfloat16 moments"),
    Case(world_size=2, zero_stage=2, optimizer="bfloat16 moments", dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, optimizer="bfloat16 moments", dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, optimizer="bfloat16 moments", max_tokens=40, updates="several with a critic"),
    Case(zero_stage=0, dtype="bfloat16"),
    Case(zero_stage=1, dtype="bfloat16"),
    Case(tensor_parallel=2, world_size=4, zero_stage=0, is_tied=False, adam_epsilon=1.0),
    Case(tensor_parallel=2, world_size=4, zero_stage=2, streamed=True, is_tied=False, offload_optimizer=True),
    Case(tensor_parallel=2, world_size=4, zero_stage=1, dtype="bfloat16", is_tied=False),
    Case(tensor_parallel=2, world_size=4, zero_stage=3, max_tokens=400, adam_epsilon=1.0),
    Case(sequence_parallel=2, world_size=4, zero_stage=2, is_tied=False, adam_epsilon=1.0),
    Case(sequence_parallel=2, world_size=4, zero_stage=1, has_adapters=True),
    Case(sequence_parallel=2, world_size=4, zero_stage=0, dtype="bfloat16"),
    Case(sequence_parallel=2, world_size=4, zero_stage=3, adam_epsilon=1.0, gradient_checkpointing=True),
    Case(world_size=2, zero_stage=1, max_tokens=200),
    Case(world_size=2, zero_stage=1, streamed=True, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=3, max_tokens=400, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=0),
    Case(world_size=2, zero_stage=2, max_tokens=40, adam_epsilon=1.0),
    Case(world_size=2, zero_stage=3, adam_epsilon=1.0, is_varlen=True, gradient_checkpointing=True),
    Case(tensor_parallel=2, world_size=4, zero_stage=1, adam_epsilon=1.0, is_varlen=True),
    Case(world_size=2, zero_stage=1, dtype="bfloat16"),
    Case(world_size=2, zero_stage=0, adam_epsilon=1.0, is_compiled=True),
    Case(world_size=2, zero_stage=1, adam_epsilon=1.0, is_compiled=True, is_varlen=True, gradient_checkpointing=True),
    Case(world_size=2, zero_stage=2, is_compiled=True, is_varlen=True, updates="several with a critic"),
    Case(world_size=2, zero_stage=2, is_compiled=True, dtype="bfloat16", gradient_checkpointing=True),
    Case(world_size=2, zero_stage=1, is_compiled=True, has_adapters=True, updates="with a reference"),
    Case(world_size=2, zero_stage=2, is_compiled=True, has_adapters=True, is_varlen=True, gradient_checkpointing=True),
    Case(world_size=2, zero_stage=0, has_adapters=True, updates="with a reference"),
    Case(world_size=2, zero_stage=2, has_adapters=True, gradient_checkpointing=True, is_tied=False),
    Case(world_size=2, zero_stage=0, streamed=True),
    Case(world_size=2, zero_stage=2, streamed=True),
    Case(world_size=2, zero_stage=3),
    Case(world_size=2, zero_stage=3, max_tokens=40, adam_epsilon=1.0, gradient_checkpointing=True),
    Case(world_size=2, zero_stage=3, max_tokens=40, has_adapters=True, updates="with a reference"),
    Case(world_size=2, zero_stage=3, has_adapters=True, dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, offload_parameters=True, offload_optimizer=True, dtype="bfloat16"),
    Case(world_size=2, zero_stage=3, offload_parameters=True, has_adapters=True, adam_epsilon=1.0),
    Case(
        world_size=2,
        zero_stage=3,
        offload_parameters=True,
        max_tokens=40,
        adam_epsilon=1.0,
        updates="several with a critic",
    ),
    Case(
        world_size=2,
        zero_stage=3,
        max_tokens=40,
        has_adapters=True,
        updates="with a reference",
        has_early_logprobs=True,
    ),
    *(Case(tensor_parallel=2, world_size=4, zero_stage=n, is_tied=False, adam_epsilon=1.0) for n in (1, 2, 3)),
    Case(tensor_parallel=2, world_size=4, zero_stage=0, streamed=True, adam_epsilon=1.0),
    Case(tensor_parallel=2, world_size=4, zero_stage=1, gradient_checkpointing=True),
    Case(tensor_parallel=2, world_size=4, zero_stage=3, dtype="bfloat16"),
    *(Case(sequence_parallel=2, world_size=4, zero_stage=n, is_tied=False, adam_epsilon=1.0) for n in (0, 1)),
    *(
        Case(sequence_parallel=4, is_context=True, world_size=4, zero_stage=n, is_tied=False, adam_epsilon=1.0)
        for n in (0, 1, 2)
    ),
    Case(sequence_parallel=4, is_context=True, world_size=4, zero_stage=1, dtype="bfloat16"),
    Case("fsdp2", sequence_parallel=2, is_context=True, world_size=4, adam_epsilon=1.0, gradient_checkpointing=True),
    Case("fsdp2", sequence_parallel=4, is_context=True, world_size=4, is_tied=False, has_adapters=True),
    Case(sequence_parallel=2, is_context=True, world_size=4, zero_stage=1, has_adapters=True, adam_epsilon=1.0),
    Case(sequence_parallel=2, is_context=True, world_size=4, zero_stage=1, adam_epsilon=1.0, updates="several"),
    Case(
        sequence_parallel=2,
        is_context=True,
        world_size=4,
        zero_stage=3,
        adam_epsilon=1.0,
        gradient_checkpointing=True,
        streamed=True,
    ),
    Case(sequence_parallel=2, world_size=4, zero_stage=0, streamed=True),
    Case(sequence_parallel=2, world_size=4, zero_stage=1, adam_epsilon=1.0, updates="several"),
    Case(sequence_parallel=2, world_size=4, zero_stage=1, adam_epsilon=1.0, updates="several", has_early_logprobs=True),
    Case(sequence_parallel=2, world_size=4, zero_stage=2, dtype="bfloat16"),
    Case("fsdp2", dtype="bfloat16", is_compiled=True, gradient_checkpointing=True),
    Case("fsdp2", world_size=2, adam_epsilon=1.0, max_tokens=200, is_compiled=True),
    Case("fsdp2", world_size=2, adam_epsilon=1.0, is_compiled=True, is_varlen=True, gradient_checkpointing=True),
    Case("fsdp2", world_size=2, has_adapters=True, is_compiled=True, updates="with a reference"),
    Case("fsdp2", world_size=2, has_adapters=True, dtype="bfloat16"),
    Case("fsdp2", world_size=2, offload_parameters=True, offload_optimizer=True, adam_epsilon=1.0),
    Case(
        "fsdp2", world_size=2, max_tokens=40, adam_epsilon=1.0, updates="several with a critic", has_early_logprobs=True
    ),
    Case("fsdp2", world_size=4, has_adapters=True, is_tied=False, streamed=True),  # of 3 rows the last rank has none
    Case("fsdp2", world_size=4, adam_epsilon=1.0, is_tied=False, fsdp_copies=2, streamed=True),
    Case("fsdp2", world_size=4, has_adapters=True, fsdp_copies=4, updates="with a reference"),
    Case("fsdp2", world_size=4, dtype="bfloat16", fsdp_copies=2, updates="several with a critic"),
    *(Case(zero_stage=n, world_size=2, has_experts=True, adam_epsilon=1.0) for n in (0, 1, 2, 3)),
    Case("fsdp2", **EXPERT_PARALLEL, adam_epsilon=1.0),
    Case("fsdp2", world_size=2, has_experts=True, dtype="bfloat16"),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, dtype="bfloat16", gradient_checkpointing=True),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, has_adapters=True, updates="with a reference"),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, adam_epsilon=1.0, updates="several with a critic", is_varlen=True),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, optimizer="bfloat16 moments"),
    Case("fsdp2", world_size=2, **EXPERT_PARALLEL, adam_epsilon=1.0, offload_parameters=True, offload_optimizer=True),
    Case("fsdp2", world_size=4, **EXPERT_PARALLEL, adam_epsilon=1.0, streamed=True),
    Case("fsdp2", world_size=4, **EXPERT_PARALLEL, adam_epsilon=1.0, fsdp_copies=2, updates="several"),
    Case("fsdp2", world_size=4, **EXPERT_PARALLEL, adam_epsilon=1.0, sequence_parallel=2, is_context=True),
]
"""Left to `make test-full`."""


def cases_of(form: str) -> list[Case]:
    """In an order with ZeRO-3 last."""
    return sorted(CASES + (LONG_CASES if form == "long" else []), key=lambda case: case.zero_stage == 3)


def make_batch(seed: int, *, poisoned: bool = False, shape: ModelShape = TIED) -> list[GroupPayload]:
    """Four groups of three, ragged, one of zero variance, some single-token answers.

    Every third token of a mixture has experts that were recorded.
    """
    rng = np.random.default_rng(seed)
    payloads = []
    for group in range(4):
        prompt = rng.integers(2, VOCAB, int(rng.integers(2, 8)))
        members = []
        for member in range(3):
            length = 1 if (group, member) == (1, 2) else int(rng.integers(2, 24))
            token_ids = np.concatenate([prompt, rng.integers(2, VOCAB, length)]).astype(np.int32)
            mask = np.arange(len(token_ids)) >= len(prompt)
            behavior = np.where(mask, rng.normal(-3.2, 0.3, len(token_ids)), 0.0).astype(np.float32)
            if poisoned and member == 0:
                behavior[-1] = np.nan
            members.append(
                Trajectory(
                    trajectory_id=TrajectoryId(f"{group}/{member}"),
                    task_id=TaskId("t"),
                    token_ids=token_ids,
                    loss_mask=mask,
                    behavior_logprobs=behavior,
                    spans=(Span(0, length),),
                    prompt="",
                    response="",
                    finish_reason="stop",
                    reward=1.0 if group == 2 else float(member % 2),
                    routes=make_routes(len(token_ids), shape, seed),
                )
            )
        payloads.append(GroupPayload(GroupId(group), tuple(members)))
    return payloads


def make_routes(num_tokens: int, shape: ModelShape, seed: int) -> Routes | None:
    """Of a token those of its position: tokens that are common to several sequences went to the same experts."""
    if not shape.num_experts:
        return None
    chosen = np.random.default_rng(seed).permuted(
        np.tile(np.arange(shape.num_experts), (num_tokens, shape.num_layers, 1)), axis=-1
    )
    routes = chosen[..., : shape.experts_per_token].astype(dtype_for(shape.num_experts))
    routes[np.arange(num_tokens) % 3 > 0] = unknown_routes(1, routes)[0]
    return routes


def create_policies(folder: Path) -> None:
    """Write the policy of either kind, with random biases: transformers would begin with zeros."""
    for case in (Case(), Case(is_tied=False), Case(has_experts=True)):
        path = folder / case.policy
        if case.is_tied:
            create_policy(ModelConfig(max_context_tokens=32, shape=case.shape), SPECIAL_TOKENS, str(path), seed=3)
        else:
            torch.manual_seed(3)
            config = Qwen2Config(
                vocab_size=UNTIED.vocab_size,
                hidden_size=UNTIED.hidden_size,
                intermediate_size=UNTIED.intermediate_size,
                num_hidden_layers=UNTIED.num_layers,
                num_attention_heads=UNTIED.num_heads,
                num_key_value_heads=UNTIED.num_kv_heads,
                max_position_embeddings=32,
                tie_word_embeddings=False,
                dtype="float32",
            )
            policy = Qwen2ForCausalLM(config)
            for name, parameter in policy.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
            policy.float().save_pretrained(path)
        (path / "tokenizer.json").write_text("{}")


def build(case: Case, model_path: str, rank: int = 0, port: int = 0) -> PolicyTrainer:
    trainer = TrainerConfig(
        backend=case.backend,
        num_ranks=case.world_size,
        zero_stage=case.zero_stage,
        tensor_parallel_size=case.tensor_parallel,
        sequence_parallel_size=case.sequence_parallel,
        sequence_parallel="context" if case.is_context else None,
        gradient_checkpointing=case.gradient_checkpointing,
        compile=case.is_compiled,
        offload_optimizer=case.offload_optimizer,
        offload_parameters=case.offload_parameters,
        fsdp_copies=case.fsdp_copies,
        expert_parallel=case.is_expert_parallel,
        max_tokens_per_micro_batch=case.max_tokens,
        lora=None if not case.has_adapters else LORA_OF_ATTENTION if case.has_experts else LORA,
        optimizer=OptimizerConfig(
            **{"lr": 1.0 if case.adam_epsilon == 1.0 else 1e-3, **OPTIMIZERS[case.optimizer]},
            eps=case.adam_epsilon,
            gradient_clip_norm=0.05,
            warmup_steps=2,
        ),
    )
    assert trainer.num_ranks == case.world_size
    spec = TrainerSpec(
        model_path=model_path,
        model=ModelConfig(max_context_tokens=32, shape=case.shape, dtype=case.dtype, attention=case.attention),
        trainer=trainer,
        algorithm=ALGORITHMS[case.updates],
        device="cpu",
        threads=1,
        seed=0,
        temperature=0.7,
        max_new_tokens=32,
        critic=CriticConfig(optimizer=trainer.optimizer.model_dump()),
    )
    return build_trainer(spec, rank, master_port=port)


def run_case(case: Case, folder: Path, rank: int = 0, port: int = 0) -> dict:
    """Two good steps with a poisoned one between, then one supervised step: all numbers that must agree."""
    torch.compiler.reset()  # or graphs of earlier cases count towards the limit of this one
    held_before = {} if case.dtype == "float32" else held_storages()
    trainer = build(case, str(folder / case.policy), rank, port)
    step = streamed_step if case.streamed else early_logprobs_step if case.has_early_logprobs else PolicyTrainer.step
    reports = [step(trainer, make_batch(1, shape=case.shape), 0)]
    before = weights_of(trainer)
    reports.append(step(trainer, make_batch(2, poisoned=True, shape=case.shape), 1))
    after = weights_of(trainer)
    reports.append(step(trainer, make_batch(3, shape=case.shape), 1))
    held = {} if case.dtype == "float32" else held_storages()
    examples = [([2, 3], [4, 5, 1]), ([5], [1]), ([7, 8, 9], [3] * 20)]
    supervised = [trainer.supervised_step(examples) for _ in range(3)]
    saved = str(folder / "saved" / "-".join(map(str, dataclasses.astuple(case))))
    to_save = of_all_ranks(trainer.held_weights(), trainer.backend.device, case.world_size, rank)
    if rank == 0:
        save_policy(trainer, saved, str(folder / case.policy), to_save)
    result = {
        "reports": reports,
        "sft_loss": [metrics["sft/loss"] for metrics in supervised],
        "accuracy": trainer.teacher_forced(examples),
        "logprobs": trainer.token_logprobs(examples),
        "held_bytes": sum(size for address, size in held.items() if address not in held_before),
        "unchanged_by_skip": all(np.array_equal(before[name], after[name]) for name in before),
        "weights": weights_of(trainer),
        "adapters": {
            f"{name} {part}": getattr(adapter, part).numpy()
            for name, adapter in trainer.backend.gathered_adapters().items()
            for part in ("down", "up")
        },
        "critic": {} if trainer.critic is None else weights_of(trainer.critic.backend),
        "offloads_parameters": getattr(getattr(trainer.backend, "_engine", None), "zero_offload_param", lambda: None)(),
        "has_compiled_layers": any(module._compiled_call_impl is not None for module in model_of(trainer).modules()),
        "moment_bytes": moment_bytes(trainer.backend),
        "saved": saved,
        "shards": {(kind, size): published(trainer, kind, size, case, rank, folder) for kind, size in case.engines},
    }
    result["desynchronised"] = desynchronised(trainer, is_last_replica=rank >= case.world_size - case.tensor_parallel)
    if rank == 0:
        result["buffers"] = {str(b.dtype) for b in model_of(trainer).buffers() if b.is_floating_point()}
    return result


def of_all_ranks(mine: HeldWeights, device: torch.device, world_size: int, rank: int) -> list[HeldWeights]:
    """What rank 0 gets of all ranks, as the driver has it sent; empty on the others."""
    if world_size == 1:
        return [mine]
    all_ranks: list[Any] | None = [None] * world_size if rank == 0 else None
    torch.distributed.gather_object(on_cpu(mine, device), all_ranks)
    return all_ranks or []


def moment_bytes(backend: Any) -> int:
    """Bytes of the optimizer's states of this process, which it has per parameter or per flat buffer."""
    optimizer = backend._engine.basic_optimizer if hasattr(backend, "_engine") else backend._optimizer
    moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    return sum(one.untyped_storage().nbytes() for one in moments)


def held_storages() -> dict[int, int]:
    """Address -> bytes of the memory of all tensors of this process, gradients included."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def desynchronised(trainer: PolicyTrainer, *, is_last_replica: bool) -> float | None:
    """What the next step says after one weight of the last replica was nudged on it alone."""
    held = trainer.local_weights()  # on all ranks: adapters that are partitioned are gathered for it
    if is_last_replica:
        next(iter(held.values()))[0] += 1e-3
    return trainer.step(make_batch(4), 2).metrics.get("rank/desynchronised")


def published(
    trainer: PolicyTrainer, kind: str, size: int, case: Case, rank: int, folder: Path
) -> list[dict[str, np.ndarray]]:
    """What the ranks of an engine find in the files of a version; every training rank writes its part."""
    training = trainer.training_sharding()
    engine = torch_layout(training.tensors)
    if kind == "vllm":
        engine = EngineLayout("vllm", read("trained_tied" if case.is_tied else "trained_untied").layouts[size])
    where = str(folder / "shards" / f"{kind}-{size}-{case.shape.vocab_size}")
    transfer = ShardTransfer.between(training, engine, "float32", where)
    ShardWriter(transfer, rank, ShardFiles(transfer)).write(1, trainer.local_weights())
    wait_for_all_ranks()  # have written
    manifest = transfer.manifest(1, [])
    shards = [dict(read_shard(manifest, tp_rank, None)) for tp_rank in range(engine.tp_size)]
    found = [{name: tensor.numpy().copy() for name, tensor in shard.items()} for shard in shards]
    wait_for_all_ranks()  # have read
    return found


def wait_for_all_ranks() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def streamed_step(trainer: PolicyTrainer, batch: list[GroupPayload], version: int) -> StepReport:
    """The same batch in three parts."""
    trainer.accumulate(batch[:1], version)
    trainer.accumulate(batch[1:3], version)
    return trainer.step(batch[3:], version)


def early_logprobs_step(trainer: PolicyTrainer, batch: list[GroupPayload], version: int) -> StepReport:
    """The same batch, three of its groups forwarded before, one group that it has not, and one for another version."""
    single = GroupPayload(GroupId(99), batch[0].trajectories[:1])  # fewer sequences than ranks
    trainer.early_logprobs([batch[3]], version + 1)
    for group in (batch[2], single, batch[0], batch[1]):
        trainer.early_logprobs([group], version)
    return trainer.step(batch, version)


def weights_of(trainer: PolicyTrainer | Backend) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in trainer.export_weights()}


def model_of(trainer: PolicyTrainer):
    backend = trainer.backend
    return backend._engine.module if hasattr(backend, "_engine") else backend._model


def main() -> None:
    torch.compiler.set_default_backend("aot_eager")  # graphs and their derivatives as on any backend, without C++
    form, folder, (rank, port, *ranks) = sys.argv[1], Path(sys.argv[4]), map(int, sys.argv[2:4] + sys.argv[5:])
    cases = [case for case in cases_of(form) if case.ranks == tuple(ranks)]
    results = {case: run_case(case, folder, rank, port) for case in cases}
    if rank == 0:
        (folder / "-".join(map(str, ["ranks", *ranks]))).write_bytes(
            pickle.dumps({dataclasses.astuple(case): result for case, result in results.items()})
        )
    if torch.distributed.is_initialized():  # a thread of gloo that still runs at the exit aborts the process
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
