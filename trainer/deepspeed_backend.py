"""DeepSpeed ZeRO 0..3 behind the `Backend` port: the only file that imports deepspeed.

What is done here and why:
- Accumulation is 1 and boundaries are set by hand, so that any number of micro-batches makes a step.
- DeepSpeed averages gradients over ranks; our loss carries the global normaliser, so it is multiplied by their number.
- Torch AdamW as client optimizer: DeepSpeed's own are compiled at first use. Nothing is compiled here.
- Gradient clipping is always written: DeepSpeed clips at 1.0 when it is not. At stage 0 in float32 it reports no norm,
  so norm and clip are computed here and DeepSpeed's clip is off (0.0).
- Non-finite gradients: ZeRO skips the step itself and reports an infinite norm; stage 0 does it here.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.backend import OptimizerResult, poison_if_not_finite
from penstock.trainer.batches.collate import ModelInputs
from penstock.trainer.config import TrainerConfig
from penstock.trainer.policy_model import (
    hf_name,
    load_policy,
    restore_rotary_buffers,
)
from penstock.trainer.torch_backend import build_adamw, divide_gradients
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.engine import TrainingSide
from penstock.weights.model_config import ModelConfig

_GATHER_BYTES = 256 << 20
_BUCKET_ELEMENTS = 50_000_000


class DeepSpeedBackend:
    """One data-parallel rank. Implements `Backend`."""

    def __init__(self, engine: Any, hf_config: Any, zero_stage: int, clip_norm: float, *, clips_here: bool) -> None:
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.device = torch.device(engine.device)
        self._engine = engine
        self._hf_config = hf_config  # transformers keeps only a weak reference; without ours, ZeRO-3 loading is off
        self._zero_stage = zero_stage
        self._clip_norm = clip_norm
        self._clips_here = clips_here

    def forward(self, inputs: ModelInputs, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, extra = inputs.call(self._engine, temperature)
        return logprobs, extra

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        self._engine.backward(poison_if_not_finite(loss) * self.world_size, scale_wrt_gas=False)

    def optimizer_step(self, normaliser: float = 1.0) -> OptimizerResult:
        if self._clips_here:
            parameters = [parameter for parameter in self._engine.module.parameters() if parameter.grad is not None]
            divide_gradients(parameters, normaliser)
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm))
            if not math.isfinite(norm):
                self._engine.zero_grad()
                return OptimizerResult(math.inf, is_skipped=True)
            self._engine.step()
            return OptimizerResult(norm, is_skipped=False)
        with self._gradients_divided_by(normaliser):
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        is_skipped = not math.isfinite(norm)
        return OptimizerResult(math.inf if is_skipped else norm, is_skipped)

    @contextmanager
    def _gradients_divided_by(self, normaliser: float) -> Iterator[None]:
        """ZeRO keeps gradients in buffers of its own; it divides them by its loss scale when it steps."""
        if normaliser == 1.0:
            yield
            return
        self._engine.optimizer.override_loss_scale(normaliser)
        try:
            yield
        finally:
            self._engine.optimizer.override_loss_scale(1.0)

    def set_lr(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        parameters = [(hf_name(name), parameter) for name, parameter in self._engine.module.named_parameters()]
        if self._zero_stage < 3:
            if self.rank == 0:
                for name, parameter in parameters:
                    yield name, parameter.detach()
            return
        for bucket in _buckets(parameters):
            yield from self._gather(bucket)

    def _gather(self, bucket: list[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
        """Full tensors of one bucket, on rank 0. Copied inside the context: leaving it re-partitions the storage."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            if self.rank != 0:
                return []
            return [(name, parameter.detach().clone()) for name, parameter in bucket]

    def training_side(self) -> TrainingSide:
        is_partitioned = self._zero_stage == 3
        tensors = tuple(
            TensorSpec(hf_name(name), tuple(parameter.ds_shape if is_partitioned else parameter.shape))
            for name, parameter in self._engine.module.named_parameters()
        )
        return TrainingSide(tensors, self.world_size, is_partitioned)

    def local_weights(self) -> dict[str, Tensor]:
        return {
            hf_name(name): (parameter.ds_tensor if self._zero_stage == 3 else parameter).detach().view(-1)
            for name, parameter in self._engine.module.named_parameters()
        }

    def save_hf(self, path: str) -> None:
        state = {name: tensor.to("cpu") for name, tensor in self.export_weights()}
        if self.rank == 0:
            self._engine.module.causal_lm.save_pretrained(path, state_dict=state)
        torch.distributed.barrier()

    def all_reduce(self, values: NDArray[np.float64], operation: Literal["sum", "max"]) -> NDArray[np.float64]:
        if self.world_size == 1:
            return values
        reduced = torch.as_tensor(values, dtype=torch.float64).clone().to(self.device)
        operations = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
        torch.distributed.all_reduce(reduced, op=operations[operation])
        return np.asarray(reduced.cpu().numpy())

    def close(self) -> None:
        self._engine.destroy()
        self._hf_config = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def build_deepspeed_backend(
    model_path: str, model: ModelConfig, trainer: TrainerConfig, *, device: str, timeout_s: float
) -> DeepSpeedBackend:
    """Join the process group, load the policy, wrap it. Collective: every rank calls it.

    `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` stand in the environment.
    """
    deepspeed = _import_deepspeed()
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timedelta(seconds=timeout_s))
    settings = deepspeed_settings(model, trainer, num_ranks=int(os.environ["WORLD_SIZE"]))
    hf_config = _announce_zero3(settings) if trainer.zero_stage == 3 else None
    policy = load_policy(model_path, model, gradient_checkpointing=trainer.gradient_checkpointing)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=build_adamw(policy, trainer.optimizer), config=settings)
    restore_rotary_buffers(policy)
    engine.train()
    return DeepSpeedBackend(
        engine,
        hf_config,
        trainer.zero_stage,
        trainer.optimizer.gradient_clip_norm,
        clips_here=_clips_here(model, trainer),
    )


def deepspeed_settings(model: ModelConfig, trainer: TrainerConfig, *, num_ranks: int) -> dict[str, Any]:
    """The DeepSpeed configuration. Batch sizes are nominal: micro-batches are counted in tokens, by us."""
    bucket = min(_BUCKET_ELEMENTS, model.shape.num_parameters)
    zero: dict[str, Any] = {
        "stage": trainer.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings: dict[str, Any] = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if _clips_here(model, trainer) else trainer.optimizer.gradient_clip_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if model.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        if trainer.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _clips_here(model: ModelConfig, trainer: TrainerConfig) -> bool:
    return trainer.zero_stage == 0 and model.dtype == "float32"


def _import_deepspeed() -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    # The shared-memory communicator would be built with a C++ compiler at first use; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _announce_zero3(settings: dict[str, Any]) -> Any:
    """Make `from_pretrained` partition while it loads. `deepspeed.zero.Init` gives garbage with this transformers."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def _buckets(parameters: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
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
