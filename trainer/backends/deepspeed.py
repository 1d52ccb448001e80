"""DeepSpeed ZeRO 0..3 behind the `Backend` port: the only file that runs it.

What is done here and why:
- Accumulation is 1 and boundaries are set by hand, so that any number of micro-batches makes a step.
- DeepSpeed averages gradients over ranks; our loss carries the global normaliser, so it is multiplied by their number.
  Under Ulysses, ZeRO-0 to 2 average over data-parallel ranks only, ZeRO-3 (reduce_scatter) over all. It knows nothing
  of context parallelism, and averages over all.
- The client optimizer is ours (trainer/optimizers/factory.py), because DeepSpeed's own are compiled at first use.
- Gradient clipping is always written: DeepSpeed clips at 1.0 when it is not. At stage 0 in float32 it reports no norm,
  so norm and clip are computed here and DeepSpeed's clip is off (0.0).
- Non-finite gradients: ZeRO skips the step itself and reports an infinite norm; at stage 0 this file does the same.
- Tensor parallelism is AutoTP with our plan (`tensor_parallel.py`), sequence parallelism is Ulysses or gathers keys and
  values (`sequence_parallel.py`). Ranks are numbered as (data, tensor) or (data, sequence), the last index fastest.
- ZeRO-3 under AutoTP: the model is loaded whole. Loading in partitions would partition the tensors that AutoTP
  leaves whole over all ranks, and those that it splits over the data-parallel ranks only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib.metadata import version
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock.dataflow.errors import CheckpointError, WeightSyncError
from penstock.kernels.linear_logprob import VocabularyShard
from penstock.trainer.backends.base import OptimizerResult, poison_if_not_finite
from penstock.trainer.backends.deepspeed_settings import clips_here, deepspeed_settings
from penstock.trainer.backends.sequence_parallel import context_group, sequence_parallelism
from penstock.trainer.backends.tensor_parallel import TensorSplit, check_splittable, splits_of
from penstock.trainer.backends.torch import (
    Loader,
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
from penstock.trainer.models.policy_model import (
    PolicyModel,
    compile_layers,
    experts_of,
    hf_name,
    hf_parameters,
    restore_rotary_buffers,
)
from penstock.trainer.optimizers.adamw import AdamW
from penstock.trainer.optimizers.factory import build_optimizer, flat_state, set_num_updates
from penstock.weights.layout.algebra import Box, Shape, TensorSpec, volume, whole
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import ModelConfig

_GATHER_BYTES = 256 << 20


class MasterStretch(NamedTuple):
    """Where this rank has float32 values of a parameter."""

    updated: Tensor
    """What the optimizer updates: the parameter, its float32 copy, or a flat buffer of several."""
    offset: int
    """First element in it."""
    start: int
    """First element in this rank's tensor-parallel part of the parameter, row-major."""
    length: int
    """Number of elements, without padding."""


class DeepSpeedBackend:
    """One rank. Implements `Backend`."""

    def __init__(
        self,
        engine: Any,
        hf_config: Any,
        trainer: TrainerConfig,
        shapes: dict[str, Shape],
        split: TensorSplit | None,
        *,
        context_group: ProcessGroup | None,
        clips_here: bool,
    ) -> None:
        """Take over an engine.

        Args:
            engine: DeepSpeed's.
            hf_config: Kept alive: transformers has only a weak reference; without ours, ZeRO-3 loading is off.
            trainer: The settings of the engine.
            shapes: HF name -> full shape of every tensor, tied ones once.
            split: Which part of each tensor this rank has; None: all of it.
            context_group: See `Backend`.
            clips_here: Whether this class clips the gradient instead of DeepSpeed.
        """
        self.rank = torch.distributed.get_rank()
        self.data_parallel_size = trainer.data_parallel_size
        self.sequence_parallel_size = trainer.sequence_parallel_size
        self.data_parallel_rank = self.rank // (trainer.tensor_parallel_size * trainer.sequence_parallel_size)
        self.sequence_parallel_rank = self.rank % trainer.sequence_parallel_size
        self.context_group = context_group
        self.device = torch.device(engine.device)
        self._num_replicas = trainer.num_ranks // trainer.tensor_parallel_size
        self.adapters = Adapters(engine.module)
        self.experts = experts_of(engine.module)
        self._is_adapted = bool(self.adapters)
        self._parameters = tuple(hf_parameters(engine.module))
        self._engine = engine
        self._hf_config = hf_config
        self._zero_stage = trainer.zero_stage
        self._is_partitioned = trainer.zero_stage == 3
        is_by_all = self._is_partitioned or context_group is not None
        self._num_averaged = self._num_replicas if is_by_all else trainer.data_parallel_size
        self._clip_norm = trainer.optimizer.gradient_clip_norm
        self._shapes = shapes
        self._split = split
        self._clips_here = clips_here

    def forward(self, inputs: ModelInputs, temperature: float) -> tuple[Tensor, Tensor]:
        return inputs.call(self._engine, temperature)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self._engine.backward(poison_if_not_finite(loss) * self._num_averaged, scale_wrt_gas=False)

    def optimizer_step(self, normaliser: float = 1.0) -> OptimizerResult:
        if self._clips_here:
            named = {hf_name(name): one for name, one in self._engine.module.named_parameters() if one.grad is not None}
            divide_gradients(named.values(), normaliser)
            gradients = {name: parameter.grad for name, parameter in named.items()}
            split = self._split
            total = torch.nn.utils.get_total_norm(gradients.values()) if split is None else split.norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(named.values(), self._clip_norm, total)
            norm = float(total)
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return OptimizerResult(math.inf, is_skipped=True)
            self._engine.step()
            return OptimizerResult(norm, is_skipped=False)
        # ZeRO keeps gradients in its own buffers and divides them by its loss scale when it steps.
        if normaliser != 1.0:
            self._engine.optimizer.override_loss_scale(normaliser)
        try:
            self._engine.step()
        finally:
            if normaliser != 1.0:
                self._engine.optimizer.override_loss_scale(1.0)
        norm = float(self._engine.get_global_grad_norm())
        is_skipped = not math.isfinite(norm)
        return OptimizerResult(math.inf if is_skipped else norm, is_skipped)

    def set_lr(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def evaluation(self) -> AbstractContextManager[None]:
        return evaluating(self._engine)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        adapters = self.gathered_adapters()
        for name, part in self._replica():
            tensor = merged(part, adapters.get(name))
            whole = tensor if self._split is None else self._split.gather(name, tensor)
            if self.rank == 0:
                yield name, whole

    def _replica(self) -> Iterator[tuple[str, Tensor]]:
        """On the ranks of the first replica, which together have the policy: name and this rank's part."""
        parameters = self._parameters
        is_first = self.rank < (1 if self._split is None else self._split.size)
        if not self._is_partitioned:
            yield from ((name, parameter.detach()) for name, parameter in parameters if is_first)
            return
        import deepspeed

        for bucket in _buckets(parameters):
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                # Copied inside the context: leaving it re-partitions the storage.
                copies = [(name, parameter.detach().clone()) for name, parameter in bucket if is_first]
            yield from copies

    def gathered_adapters(self) -> dict[str, Adapter]:
        if not self._is_adapted:
            return {}
        if not self._is_partitioned:
            return self.adapters.copies()
        import deepspeed

        with deepspeed.zero.GatheredParameters(self.adapters.parameters()):
            return self.adapters.copies()

    def training_sharding(self) -> TrainingSharding:
        tensors = tuple(TensorSpec(name, shape) for name, shape in self._shapes.items())
        if self._split is None:
            return TrainingSharding(tensors, self._num_replicas, self._is_partitioned)
        return TrainingSharding(tensors, self._num_replicas, self._is_partitioned, self._split.size, self._split.splits)

    def local_weights(self) -> dict[str, Tensor]:
        adapters = self.gathered_adapters()
        held = {}
        for name, parameter in self._parameters:
            part = (parameter.ds_tensor if self._is_partitioned else parameter).detach().view(-1)
            if name not in adapters:
                held[name] = part
            elif not self._is_partitioned:
                held[name] = merged(part, adapters[name])
            else:  # one row-major stretch of the weight; what lies behind it is padding
                start = self.rank * part.numel()
                own = part[: max(0, parameter.ds_numel - start)].to(self.device)  # from host memory, if off-loaded
                held[name] = merged(own, adapters[name], start)
        return held

    def held_weights(self) -> dict[str, Tensor]:
        if not self._is_partitioned and self.rank >= (1 if self._split is None else self._split.size):
            return {}
        parameters = saved_parameters(self._engine.module, self.adapters)
        return {name: (one.ds_tensor if self._is_partitioned else one).detach().view(-1) for name, one in parameters}

    def save_hf(self, path: str, held: Sequence[Mapping[str, Tensor]]) -> None:
        save_model(self._engine.module.hf_model, self.training_sharding(), self.adapters, held, path)

    def fragments(self) -> list[Fragment]:
        held, split = self._held(), self._split
        if split is not None and split.rank > 0:  # what is whole on all of them is written by the first one
            held = [one for one in held if hf_name(one.name) in split.splits]
        return deal(held, self._replica_rank, self._num_replicas) if self._zero_stage == 0 else held

    def restore(self, reader: CheckpointReader, prefix: str) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        parameters = trained_parameters(engine.module)
        shapes = {name: self._part_of(name, one)[0] for name, one in parameters}
        reader.check_model(prefix, shapes, engine.basic_optimizer.states)
        names_of: dict[Tensor, list[str]] = {updated: [] for updated in self._updated()}
        for name, _, master in self._masters():
            names_of[master.updated].append(name)
        for updated, names in names_of.items():
            set_num_updates(engine.basic_optimizer, updated, reader.num_updates(prefix, names))
        if self._is_partitioned:
            optimizer.checkpoint_event_prologue()  # partitions the small parameters that are whole between steps
        reader.fill(prefix, self._held())
        # The float32 values are restored. The model computes with copies, unless it is float32 without ZeRO.
        if self._is_partitioned:
            for _, parameter, master in self._masters():
                values = master.updated.detach()[master.offset : master.offset + master.length]
                parameter.ds_tensor.data[: master.length].copy_(values)
            optimizer.checkpoint_event_epilogue()
        elif self._zero_stage > 0:
            of_deepspeed(optimizer, "update_lp_params")()
        else:
            with torch.no_grad():
                for _, parameter, master in self._masters():
                    parameter.copy_(master.updated)

    def _held(self) -> list[Fragment]:
        """All float32 values that this rank has; the same on all replicas at stage 0."""
        held = []
        for name, parameter, (updated, offset, start, length) in self._masters():
            shape, box = self._part_of(name, parameter)
            window = slice(offset, offset + length)
            state = flat_state(self._engine.basic_optimizer, updated)
            of_parameter = {key: one if key == "step" else one[window] for key, one in state.items()}
            held.append(Fragment.of(name, shape, updated.view(-1)[window], of_parameter, box=box, start=start))
        return held

    def _part_of(self, name: str, parameter: Any) -> tuple[Shape, Box]:
        """Full shape of a parameter, and the part that the ranks of this tensor-parallel rank share."""
        if self._split is None:
            shape = full_shape(parameter)
            return shape, whole(shape)
        return self._shapes[hf_name(name)], self._split.box(hf_name(name))

    @property
    def _replica_rank(self) -> int:
        """This rank among those with the same tensor-parallel part, over which ZeRO partitions."""
        return self.rank // (1 if self._split is None else self._split.size)

    def _masters(self) -> Iterator[tuple[str, Any, MasterStretch]]:
        """Name, live parameter and float32 values of each trained parameter of which this rank has some."""
        optimizer, basic = self._engine.optimizer, self._engine.basic_optimizer
        copies: dict[Tensor, Tensor] = {}
        if self._zero_stage == 0 and optimizer is not basic:  # bfloat16: the optimizer has a float32 copy of each
            groups = zip(of_deepspeed(optimizer, "fp16_groups"), of_deepspeed(optimizer, "fp32_groups"), strict=True)
            copies = dict(pair for low, high in groups for pair in zip(low, high, strict=True))
        for name, parameter in trained_parameters(self._engine.module):
            if self._zero_stage == 0:
                yield name, parameter, MasterStretch(copies.get(parameter, parameter), 0, 0, parameter.numel())
            elif self._is_partitioned:
                values, group = of_deepspeed(optimizer, "_get_fp32_opt_state_partition")(
                    parameter, release_swap_buffers=False
                )
                updated = of_deepspeed(optimizer, "fp32_partitioned_groups_flat")[group]
                start = self._replica_rank * values.numel()
                length = min(values.numel(), volume(self._part_of(name, parameter)[1]) - start)
                if length > 0:  # behind it is padding
                    offset = values.storage_offset() - updated.storage_offset()
                    yield name, parameter, MasterStretch(updated, offset, start, length)
            elif (mapping := of_deepspeed(parameter, "_hp_mapping")) is not None:
                (updated,) = basic.param_groups[mapping.param_group_index]["params"]
                address = mapping.get_hp_fragment_address()
                start = mapping.lp_fragment_address.start
                yield name, parameter, MasterStretch(updated, address.start, start, address.numel)

    def _updated(self) -> list[Tensor]:
        """All that the optimizer updates on this rank, also flat buffers with nothing but padding."""
        if self._is_partitioned:
            return list(of_deepspeed(self._engine.optimizer, "fp32_partitioned_groups_flat"))
        return [one for group in self._engine.basic_optimizer.param_groups for one in group["params"]]

    def all_reduce(self, values: NDArray[np.float64], operation: Literal["sum", "max"]) -> NDArray[np.float64]:
        if self._num_replicas == 1:
            return values
        reduced = torch.as_tensor(values, dtype=torch.float64).clone().to(self.device)
        operations = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
        group = self._engine.seq_data_parallel_group  # tensor-parallel ranks saw the same tokens
        torch.distributed.all_reduce(reduced, op=operations[operation], group=group)
        return np.asarray(reduced.cpu().numpy())

    def close(self) -> None:
        self._engine.destroy()
        self._hf_config = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def build_deepspeed_backend(
    load: Loader, model_path: str, model: ModelConfig, trainer: TrainerConfig, device: str
) -> DeepSpeedBackend:
    """Join the process group, load the model, wrap it. Collective: every rank calls it.

    A process may have several, of one ZeRO stage, without tensor or sequence parallelism.

    `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` must be set in the environment.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # The shared-memory communicator would be built with a C++ compiler at first use; gloo does not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if device == "cpu" else "nccl"
    limit = timedelta(seconds=2 * trainer.step_timeout_s)  # so that the driver, which can go back, gives up first
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=limit)
    if AdamW not in ZERO_SUPPORTED_OPTIMIZERS:  # or it warns of an optimizer that it does not know
        ZERO_SUPPORTED_OPTIMIZERS.append(AdamW)
    settings = deepspeed_settings(model, trainer)
    hf_config = None
    if trainer.zero_stage == 3 and trainer.tensor_parallel_size == 1:
        from transformers.integrations import HfDeepSpeedConfig

        # Makes `from_pretrained` partition while it loads. `deepspeed.zero.Init` gives garbage with this transformers.
        hf_config = HfDeepSpeedConfig(settings)
    is_split = trainer.tensor_parallel_size > 1
    policy: Any = load(model_path, model, gradient_checkpointing=trainer.gradient_checkpointing)
    shapes = {name: full_shape(parameter) for name, parameter in hf_parameters(policy)}
    if is_split:
        check_splittable(shapes, trainer.tensor_parallel_size)
    sharing = sequence_parallelism(model, trainer)
    mpu = register_ulysses(policy, model, trainer) if sharing == "ulysses" else None
    group = context_group(trainer) if sharing == "context" else None
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=build_optimizer(policy, trainer.optimizer), config=settings, mpu=mpu
    )
    split = take_split(policy, shapes) if is_split else None
    restore_rotary_buffers(policy)
    if trainer.compile:
        compile_layers(policy)
    engine.train()
    if trainer.zero_stage == 3:
        held = {name: parameter.ds_tensor.numel() for name, parameter in hf_parameters(policy)}
        sizes = {name: prod(shape) if split is None else volume(split.box(name)) for name, shape in shapes.items()}
        check_partitions(held, sizes, trainer.num_ranks // trainer.tensor_parallel_size, torch.distributed.get_rank())
    clips = clips_here(model, trainer)
    return DeepSpeedBackend(engine, hf_config, trainer, shapes, split, context_group=group, clips_here=clips)


def _buckets(parameters: Sequence[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive parameters whose full size is at most `_GATHER_BYTES` (or one that is larger)."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, parameter in parameters:
        num_bytes = parameter.ds_numel * parameter.element_size()
        if bucket and size + num_bytes > _GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += num_bytes
    if bucket:
        yield bucket


def full_shape(parameter: Any) -> Shape:
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def take_split(policy: PolicyModel, shapes: dict[str, Shape]) -> TensorSplit:
    """Read the splits that AutoTP has made, and set which part of the vocabulary the head has. Collective."""
    from deepspeed.utils import groups

    rank, size = groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()
    group = groups.get_tensor_model_parallel_group()
    held: list[Any] = [None] * size
    mine = {name: full_shape(parameter) for name, parameter in hf_parameters(policy)}
    torch.distributed.all_gather_object(held, mine, group=group)
    split = TensorSplit(rank, size, group, shapes, splits_of(shapes, held))
    if "lm_head.weight" in shapes:
        (start, stop), _ = split.box("lm_head.weight")
        policy.vocabulary = VocabularyShard(start, stop, split.group)
    return split


def register_ulysses(policy: PolicyModel, model: ModelConfig, trainer: TrainerConfig) -> Any:
    """Replace the attention function of transformers, in this process, by one that exchanges stretches for heads.

    Returns:
        DeepSpeed's module of process groups. A second trainer of a process uses the same groups and function.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None:  # noqa: SLF001 - its getter raises while it is None
        return parallel_state_sp
    return UlyssesSPAttentionHF.register_with_transformers(
        policy.causal_lm,
        core_attn_implementation=model.attention,
        sequence_parallel_size=trainer.sequence_parallel_size,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )


def of_deepspeed(owner: Any, name: str) -> Any:
    """An attribute of DeepSpeed without which there are no checkpoints, some of them private.

    Raises:
        CheckpointError: If this version has no such attribute.
    """
    found = getattr(owner, name, of_deepspeed)
    if found is of_deepspeed:
        raise CheckpointError(
            f"trainer: {type(owner).__name__} of DeepSpeed {version('deepspeed')} has no `{name}`, where the float32 "
            "parameters and moments are found. Without it no checkpoint can be taken or restored. Install a version "
            "that pyproject.toml allows."
        )
    return found


def check_partitions(held: Mapping[str, int], num_elements: Mapping[str, int], num_replicas: int, rank: int) -> None:
    """Check that ZeRO-3 has partitioned as weights/layout/training.py assumes.

    Rank r of W holds the elements [r · p, (r + 1) · p) of a tensor of n in row-major order, p = ceil(n / W), the last
    ones padding. A version of DeepSpeed that pads or partitions differently has another p: training would continue,
    but the wrong elements would be published.

    Args:
        held: HF name -> elements that this rank has of a tensor, padding included.
        num_elements: HF name -> elements that the replicas partition: the tensor or a tensor-parallel rank's part.
        num_replicas: W.
        rank: For the message.

    Raises:
        WeightSyncError: With the first tensor that differs, and both sizes.
    """
    for name, found in held.items():
        part = -(-num_elements[name] // num_replicas)
        if found != part:
            raise WeightSyncError(
                f"trainer rank {rank}: ZeRO-3 holds {found} elements of {name}, and {part} were planned "
                f"({num_elements[name]} over {num_replicas} ranks, rounded up): this version of DeepSpeed partitions "
                "in another way than we publish. Set trainer.zero_stage=2, or install the version that is pinned."
            )
