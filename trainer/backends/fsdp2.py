"""FSDP2, torch's `fully_shard`, behind the `Backend` port: each decoder layer and the rest of the model are a group.

    forward, backward   layer by layer: gather in `model.dtype` → compute → free; gradients reduce-scattered in float32
    optimizer_step      AdamW on the rank's rows of the float32 parameters, from which the next forward gathers

What is done here and why:
- A rank holds ceil(rows / W) rows of every parameter, along its first dimension; the last ranks may hold fewer or none.
- These rows are the master weights: `MixedPrecisionPolicy` rounds them to `model.dtype` where they are gathered.
- The optimizer has the plain tensors behind the DTensors. They are updated element by element, so nothing is exchanged,
  and its state is that of every other backend.
- `fully_shard` averages gradients over ranks; our loss carries the global normaliser, so it is told to sum.
- Every micro-batch is reduce-scattered at once, as in ZeRO-2 and 3: gradients that wait for the last one would take
  4 bytes per parameter on every rank. Copies of the model (HSDP) exchange their gradients with the last one only.
- Experts that stay on their ranks (backends/expert_parallel.py) are groups over a mesh of one rank, and of its copies:
  rounded to `model.dtype` and summed over copies like all else, but never gathered.
- A parameter that a rank has not used has a gradient of zeros there, or ranks with other experts would wait for it.
- torch keeps the group of the rest (embedding, head) gathered after a forward pass, for its backward pass. If there is
  none, it is freed here; else the next optimizer step would not be seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from penstock.dataflow.errors import ConfigError, WeightSyncError
from penstock.trainer.backends.base import OptimizerResult, poison_if_not_finite
from penstock.trainer.backends.expert_parallel import place_experts
from penstock.trainer.backends.sequence_parallel import context_group
from penstock.trainer.backends.torch import (
    Loader,
    WrappedModel,
    divide_gradients,
    evaluating,
    save_model,
    saved_parameters,
    trained_parameters,
)
from penstock.trainer.batches.collate import ModelInputs
from penstock.trainer.checkpoint import CheckpointReader, Fragment, deal
from penstock.trainer.config import TrainerConfig
from penstock.trainer.models.lora import Adapter, Adapters, merged
from penstock.trainer.models.policy_model import compile_layers, experts_of, hf_parameters, layers_of
from penstock.trainer.optimizers.adamw import AdamW
from penstock.trainer.optimizers.factory import flat_state, set_num_updates
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import ModelConfig


class Fsdp2Backend:
    """One rank. Implements `Backend`."""

    def __init__(
        self,
        model: WrappedModel,
        mesh: DeviceMesh,
        trainer: TrainerConfig,
        dtype: torch.dtype,
        device: torch.device,
        context_group: ProcessGroup | None,
    ) -> None:
        """Take over a model that is sharded.

        Args:
            model: After `shard`.
            mesh: `mesh_of` the ranks.
            trainer: Its settings.
            dtype: Of what is computed and saved.
            device: Of what is computed; parameters are elsewhere if they are off-loaded.
            context_group: See `Backend`.

        Raises:
            WeightSyncError: If a rank holds other rows than those that are published.
        """
        self.rank = distributed.get_rank()
        self.data_parallel_size = trainer.data_parallel_size
        self.sequence_parallel_size = trainer.sequence_parallel_size
        self.data_parallel_rank, self.sequence_parallel_rank = divmod(self.rank, trainer.sequence_parallel_size)
        self.context_group = context_group
        self.device = device
        self.adapters = Adapters(model)
        self.experts = experts_of(model)
        self._model: Any = model
        self._dtype = dtype
        self._clip_norm = trainer.optimizer.gradient_clip_norm
        self._num_ranks = trainer.num_ranks
        self._num_copies, self._copy = trainer.fsdp_copies, mesh.get_local_rank("copy")
        self._shards = mesh["shard"]
        self._num_shards, self._shard = self._shards.size(), self._shards.get_local_rank()
        # While a layer computes, the module has its gathered parameters, and these are still the rank's rows.
        self._parameters = tuple(hf_parameters(model))
        self._saved = tuple(saved_parameters(model, self.adapters))
        self._trained = tuple(trained_parameters(model))
        self._masters = [nn.Parameter(rows_of(one)) for _, one in self._trained]
        named = zip((name for name, _ in self._trained), self._masters, strict=True)
        self._optimizer = AdamW(list(named), trainer.optimizer)
        check_rows(self.local_rows(), self.training_sharding(), self.rank)

    def forward(self, inputs: ModelInputs, temperature: float) -> tuple[Tensor, Tensor]:
        results = inputs.call(self._model, temperature)
        if not torch.is_grad_enabled():
            self._model.reshard()
        return results

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        if self._num_copies > 1:
            self._model.set_requires_all_reduce(is_last)
        poison_if_not_finite(loss).backward()

    @torch.no_grad()
    def optimizer_step(self, normaliser: float = 1.0) -> OptimizerResult:
        for master, (_, parameter) in zip(self._masters, self._trained, strict=True):
            gradient: Any = parameter.grad
            master.grad = None if gradient is None else gradient.to_local()
            parameter.grad = None
        divide_gradients(self._masters, normaliser)
        gradients = [one.grad for one in self._masters if one.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients).to(self.device, torch.float64).square()
        distributed.all_reduce(squares, group=self._shards.get_group())
        norm = math.sqrt(float(squares))
        is_finite = math.isfinite(norm)
        if is_finite:
            torch.nn.utils.clip_grads_with_norm_(self._masters, self._clip_norm, torch.tensor(norm))
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return OptimizerResult(norm if is_finite else math.inf, is_skipped=not is_finite)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def evaluation(self) -> AbstractContextManager[None]:
        return evaluating(self._model)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        adapters = self.gathered_adapters()
        for name, parameter in self._parameters:
            whole = self._whole(parameter)
            if self.rank == 0:
                yield name, merged(whole, adapters.get(name))

    def _whole(self, parameter: Any) -> Tensor:
        """The whole of a parameter, on every rank. Collective."""
        size, stride = parameter.shape, parameter.stride()
        rows = rows_of(parameter).to(self.device)
        whole = DTensor.from_local(rows, self._shards, [Shard(0)], run_check=False, shape=size, stride=stride)
        return whole.full_tensor()

    def gathered_adapters(self) -> dict[str, Adapter]:
        return self.adapters.copies(self._whole)

    def training_sharding(self) -> TrainingSharding:
        tensors = tuple(TensorSpec(name, tuple(one.shape)) for name, one in self._parameters)
        ranks = self._num_ranks
        return TrainingSharding(tensors, ranks, is_partitioned=True, by_rows=True, num_copies=self._num_copies)

    def local_rows(self) -> dict[str, Tensor]:
        """HF name -> this rank's rows, flat, without what adapters add."""
        return {name: rows_of(one).view(-1) for name, one in self._parameters}

    def local_weights(self) -> dict[str, Tensor]:
        held = self.local_rows()
        shapes = dict(self._parameters)
        for name, adapter in self.gathered_adapters().items():
            held[name] = merged(held[name].to(self.device), adapter, self._start_of(shapes[name]))
        return held

    def held_weights(self) -> dict[str, Tensor]:
        return {} if self._copy else {name: rows_of(one).view(-1) for name, one in self._saved}

    def save_hf(self, path: str, held: Sequence[Mapping[str, Tensor]]) -> None:
        weights = {name for name, _ in self._parameters}
        rounded = [
            {name: one.to(self._dtype) if name in weights else one for name, one in of_rank.items()} for of_rank in held
        ]
        save_model(self._model.hf_model, self.training_sharding(), self.adapters, rounded, path)

    def fragments(self) -> list[Fragment]:
        return deal(self._held(), self._copy, self._num_copies)

    def restore(self, reader: CheckpointReader, prefix: str) -> None:
        shapes = {name: tuple(one.shape) for name, one in self._trained}
        reader.check_model(prefix, shapes, self._optimizer.states)
        for master, (name, _) in zip(self._masters, self._trained, strict=True):
            set_num_updates(self._optimizer, master, reader.num_updates(prefix, [name]))
        reader.fill(prefix, self._held())

    def _held(self) -> list[Fragment]:
        """All trained rows of this rank; the same on the ranks of every copy that hold these."""
        return [
            Fragment.of(
                name,
                tuple(one.shape),
                master.view(-1),
                flat_state(self._optimizer, master),
                start=self._start_of(one),
            )
            for master, (name, one) in zip(self._masters, self._trained, strict=True)
            if master.numel()
        ]

    def _start_of(self, parameter: Any) -> int:
        """First element of this rank's rows, row-major."""
        num_rows, *rest = parameter.shape
        return min(self._shard * -(-num_rows // self._num_shards), num_rows) * prod(rest)

    def all_reduce(self, values: NDArray[np.float64], operation: Literal["sum", "max"]) -> NDArray[np.float64]:
        if self._num_ranks == 1:
            return values
        reduced = torch.as_tensor(values, dtype=torch.float64).clone().to(self.device)
        operations = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        distributed.all_reduce(reduced, op=operations[operation])
        return np.asarray(reduced.cpu().numpy())

    def close(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def build_fsdp2_backend(
    load: Loader, model_path: str, model: ModelConfig, trainer: TrainerConfig, device: str
) -> Fsdp2Backend:
    """Join the process group, load the model, shard it. Collective: every rank calls it. A process may have several.

    `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` must be set in the environment.
    """
    # A critic's values are a view. They are not changed in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    if not distributed.is_initialized():
        limit = timedelta(seconds=2 * trainer.step_timeout_s)  # so that the driver, which can go back, gives up first
        distributed.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit)
    mesh = mesh_of(trainer, device)
    policy = load(model_path, model, gradient_checkpointing=trainer.gradient_checkpointing)
    dtype = TORCH_DTYPES[model.dtype]
    apart = place_experts(policy.hf_model, mesh["shard"]) if trainer.expert_parallel else []
    shard(policy, mesh, dtype, apart, is_offloaded=trainer.offload_parameters)
    if trainer.compile:
        compile_layers(policy)
    computes_on = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    group = context_group(trainer) if trainer.sequence_parallel_size > 1 else None
    return Fsdp2Backend(policy, mesh, trainer, dtype, computes_on, group)


def mesh_of(trainer: TrainerConfig, device: str) -> DeviceMesh:
    """Copies of the model × one rank alone × the ranks that share a copy. Collective."""
    shape = (trainer.fsdp_copies, 1, trainer.num_ranks // trainer.fsdp_copies)
    return init_device_mesh(device, shape, mesh_dim_names=("copy", "alone", "shard"))


def shard(
    model: WrappedModel, mesh: DeviceMesh, dtype: torch.dtype, apart: Sequence[nn.Module] = (), *, is_offloaded: bool
) -> None:
    """Shard each layer of a model, and the rest of it, over a mesh; trained parameters become float32.

    Args:
        model: Whole, in main memory; changed in place. One group at a time is copied to the device of the mesh.
        mesh: `mesh_of` the ranks.
        dtype: Of gathered parameters.
        apart: Its modules of experts, if each rank has its own.
        is_offloaded: Parameters, gradients and optimizer state stay in main memory.

    Raises:
        ConfigError: If a parameter has no dimension along which it could be split.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                [f"trainer.backend=fsdp2: {name} is a single number, and parameters are split by rows. Train this "
                 "model with trainer.backend=deepspeed."]
            )  # fmt: skip
    is_rounded = dtype != torch.float32
    # Inputs stay as they are: the model's own code casts them where it computes in `dtype`.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if is_rounded else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if is_offloaded else OffloadPolicy()
    for module in [*apart, *layers_of(model)[::-1], model]:  # what is inside another one comes before it
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        over = "alone" if module in apart else "shard"
        ranks = mesh["copy", over] if mesh["copy"].size() > 1 else mesh[over]
        fully_shard(module, mesh=ranks, mp_policy=policy, offload_policy=offload)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)  # gloo cannot scale while it reduces
        module.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True, recurse=False)


def rows_of(parameter: Any) -> Tensor:
    """This rank's rows of a parameter, as an alias."""
    rows: Tensor = parameter.detach().to_local()
    return rows


def check_rows(held: Mapping[str, Tensor], sharding: TrainingSharding, rank: int) -> None:
    """Check that torch has split as weights/layout/training.py assumes; otherwise the wrong elements are published.

    Args:
        held: HF name -> this rank's rows, flat.
        sharding: What is published by.
        rank: This one.

    Raises:
        WeightSyncError: With the first tensor that differs, and both sizes.
    """
    for name, planned in sharding.layout().buffers[rank].items():
        if (found := held[name].numel()) != planned:
            raise WeightSyncError(
                f"trainer rank {rank}: FSDP2 holds {found} elements of {name}, and {planned} were planned "
                f"({sharding.description}): this version of torch splits in another way than we publish. Set "
                "trainer.backend=deepspeed, or install the version that is pinned."
            )
