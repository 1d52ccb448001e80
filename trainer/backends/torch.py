"""Plain torch on one process: for tests and tiny runs, and what other backends are compared with. float32 only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock.trainer.backends.base import OptimizerResult, poison_if_not_finite
from penstock.trainer.batches.collate import ModelInputs
from penstock.trainer.checkpoint import CheckpointReader, Fragment
from penstock.trainer.config import TrainerConfig
from penstock.trainer.models.lora import Adapter, Adapters, merged, save_adapter
from penstock.trainer.models.policy_model import PolicyModel, compile_layers, experts_of, hf_parameters
from penstock.trainer.models.value_model import ValueModel
from penstock.trainer.optimizers.factory import Optimizer, build_optimizer, flat_state, set_num_updates
from penstock.weights.layout.algebra import TensorSpec, whole_tensors
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import ModelConfig
from penstock.weights.policy_folder import write_policy

WrappedModel = PolicyModel | ValueModel
Loader = Callable[..., WrappedModel]
"""`load_policy` or `load_value_model`."""


class TorchBackend:
    """One rank, whole parameters. Implements `Backend`."""

    rank = data_parallel_rank = sequence_parallel_rank = 0
    data_parallel_size = sequence_parallel_size = 1
    context_group: ProcessGroup | None = None

    def __init__(self, model: WrappedModel, optimizer: Optimizer, clip_norm: float) -> None:
        self.device = next(model.parameters()).device
        self.adapters = Adapters(model)
        self.experts = experts_of(model)
        self._model = model
        self._optimizer = optimizer
        self._clip_norm = clip_norm

    def forward(self, inputs: ModelInputs, temperature: float) -> tuple[Tensor, Tensor]:
        return inputs.call(self._model, temperature)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        del is_last
        poison_if_not_finite(loss).backward()

    def optimizer_step(self, normaliser: float = 1.0) -> OptimizerResult:
        divide_gradients(self._model.parameters(), normaliser)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm))
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return OptimizerResult(grad_norm if is_finite else math.inf, is_skipped=not is_finite)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def evaluation(self) -> AbstractContextManager[None]:
        return evaluating(self._model)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        adapters = self.gathered_adapters()
        for name, parameter in hf_parameters(self._model):
            yield name, merged(parameter.detach(), adapters.get(name))

    def gathered_adapters(self) -> dict[str, Adapter]:
        return self.adapters.copies()

    def training_sharding(self) -> TrainingSharding:
        parameters = hf_parameters(self._model)
        return TrainingSharding(tuple(TensorSpec(name, tuple(parameter.shape)) for name, parameter in parameters))

    def local_weights(self) -> dict[str, Tensor]:
        return {name: tensor.view(-1) for name, tensor in self.export_weights()}

    def held_weights(self) -> dict[str, Tensor]:
        return {name: one.detach().view(-1) for name, one in saved_parameters(self._model, self.adapters)}

    def save_hf(self, path: str, held: Sequence[Mapping[str, Tensor]]) -> None:
        save_model(self._model.hf_model, self.training_sharding(), self.adapters, held, path)

    def fragments(self) -> list[Fragment]:
        # The optimizer has the float32 parameters of the model itself.
        return [
            Fragment.of(name, tuple(one.shape), one.view(-1), flat_state(self._optimizer, one))
            for name, one in trained_parameters(self._model)
        ]

    def restore(self, reader: CheckpointReader, prefix: str) -> None:
        parameters = trained_parameters(self._model)
        reader.check_model(prefix, {name: tuple(one.shape) for name, one in parameters}, self._optimizer.states)
        for name, parameter in parameters:
            set_num_updates(self._optimizer, parameter, reader.num_updates(prefix, [name]))
        reader.fill(prefix, self.fragments())

    def all_reduce(self, values: NDArray[np.float64], operation: Literal["sum", "max"]) -> NDArray[np.float64]:
        del operation
        return values

    def close(self) -> None:
        """Do nothing, because there is no process group."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Context in which a model, wrapped or not, keeps no graph."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def saved_parameters(model: torch.nn.Module, adapters: Adapters) -> Iterator[tuple[str, Any]]:
    """Name and parameter of all that a saved model is made from: its weights, and A and B of its adapters."""
    yield from hf_parameters(model)
    yield from adapters.named_parameters()


def save_model(
    hf_model: Any, sharding: TrainingSharding, adapters: Adapters, held: Sequence[Mapping[str, Tensor]], path: str
) -> None:
    """Write a model in Hugging Face form, and its adapters, if it has any, by themselves in the folder `adapter`; peft
    has no adapters of this kind for experts, so they are written merged only.

    Args:
        hf_model: Its class and configuration; its weights are not used.
        sharding: How the ranks hold the weights. They hold A and B of adapters likewise, but never split.
        adapters: Of the model.
        held: `Backend.held_weights` of each rank.
        path: Folder to write.
    """
    whole = whole_tensors(replace(sharding, tensors=(*sharding.tensors, *adapters.tensors())).layout(), held)
    additions = adapters.of(whole)
    weights = {name: merged(whole[name], additions.get(name)).to("cpu") for name, _ in sharding.tensors}
    write_policy(hf_model, weights, Path(path))
    if additions and all(one.down.dim() == 2 for one in additions.values()):
        save_adapter(hf_model, additions, Path(path) / "adapter")


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Name in the wrapped model and parameter, of all that is trained, tied ones once."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def divide_gradients(parameters: Iterable[torch.nn.Parameter], normaliser: float) -> None:
    """Divide gradients of losses whose normaliser was unknown in backward. Does nothing for 1."""
    if normaliser != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(normaliser)


def build_torch_backend(
    load: Loader, model_path: str, model: ModelConfig, trainer: TrainerConfig, device: str
) -> TorchBackend:
    """Load a model, and its optimizer."""
    policy = load(model_path, model, gradient_checkpointing=trainer.gradient_checkpointing).to(device)
    if trainer.compile:
        compile_layers(policy)
    return TorchBackend(policy, build_optimizer(policy, trainer.optimizer), trainer.optimizer.gradient_clip_norm)
