"""LoRA with the layers of peft: loaded weights are frozen, and a low-rank addition to some of them is trained.

    W' = W + s·B·A,  s = alpha / rank;  W [out, in] frozen, A [rank, in] random, B [out, rank] zero at first

So training starts at the loaded policy, gradients and optimizer state exist for A and B only, and with s = 0 the model
is the initial policy, which serves as the reference. Hu et al., arXiv 2106.09685.

A weight of experts is E matrices, each with its own A and B; W' of all of them exists while they compute.

The layers are put into the Hugging Face model in place, so its body and head are called as before. There is no
dropout: it would make the trainer's logprobs differ from those of the engines, like staleness does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.dataflow.errors import ConfigError
from penstock.trainer.config import LoraConfig
from penstock.trainer.models.policy_model import PolicyModel, hf_name, load_policy
from penstock.trainer.validation import unmatched_targets
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import expert_weights, linear_layers
from penstock.weights.model_config import ModelConfig

_NAME = "default"
"""peft's name of the only adapter of a layer."""
_DOWN, _UP = ":lora_A", ":lora_B"
_OF_EXPERTS = ".lora_"
"""Between the module of experts and the name of its weight, in the name of the module with its adapter."""


class Adapter(NamedTuple):
    """The addition to one weight: scale · up @ down."""

    down: Tensor
    """A `[rank, in]`, of experts `[E, rank, in]`."""
    up: Tensor
    """B `[out, rank]`, of experts `[E, out, rank]`."""
    scale: float
    """s; 0 while it is switched off."""


class Adapters:
    """All adapters of a model; empty (and false) where all of its weights are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Any] = {
            hf_name(name.replace(_OF_EXPERTS, ".") if isinstance(module, ExpertDelta) else f"{name}.weight"): module
            for name, module in model.named_modules()
            if hasattr(module, "lora_A")
        }
        self._scales = {name: layer.scaling[_NAME] for name, layer in self._layers.items()}
        self._shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in self.named_parameters()}

    def __len__(self) -> int:
        return len(self._layers)

    def parameters(self) -> list[nn.Parameter]:
        """All A and B."""
        return [part[_NAME].weight for layer in self._layers.values() for part in (layer.lora_A, layer.lora_B)]

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """A and B of each adapted weight, named after it."""
        for name, layer in self._layers.items():
            yield f"{name}{_DOWN}", layer.lora_A[_NAME].weight
            yield f"{name}{_UP}", layer.lora_B[_NAME].weight

    def tensors(self) -> list[TensorSpec]:
        """Names and full shapes of all A and B."""
        return [TensorSpec(name, shape) for name, shape in self._shapes.items()]

    def of(self, whole: Mapping[str, Tensor]) -> dict[str, Adapter]:
        """HF name of each adapted weight -> its adapter, from whole tensors, whether or not it is switched off now."""
        return {
            name: Adapter(whole[f"{name}{_DOWN}"].float(), whole[f"{name}{_UP}"].float(), scale)
            for name, scale in self._scales.items()
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the model is the initial policy.

        It sets s = 0 and does not skip the layers: ZeRO-3 needs every forward to use the parameters in one order.
        """
        try:
            for layer in self._layers.values():
                layer.set_scale(_NAME, 0.0)
            yield
        finally:
            for layer in self._layers.values():
                layer.set_scale(_NAME, 1.0)

    def copies(self, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Adapter]:
        """HF name of each adapted weight -> a copy of its adapter, float32. Under ZeRO-3 only while gathered.

        Args:
            whole: Gathers one A or B, where the ranks share it.
        """
        return {
            name: Adapter(
                whole(layer.lora_A[_NAME].weight).float().clone(),
                whole(layer.lora_B[_NAME].weight).float().clone(),
                layer.scaling[_NAME],
            )
            for name, layer in self._layers.items()
        }


@torch.no_grad()
def merged(part: Tensor, adapter: Adapter | None, start: int = 0) -> Tensor:
    """A weight, or a row-major stretch of it, with its adapter added in float32 and rounded once.

    Args:
        part: Elements [start, start + n) of W in row-major order, of any shape; not changed.
        adapter: None, or switched off: `part` itself is returned.
        start: Where the stretch begins.
    """
    if adapter is None or adapter.scale == 0 or part.numel() == 0:
        return part
    columns, stop = adapter.down.shape[-1], start + part.numel()
    first, last = start // columns, -(-stop // columns)
    rows = adapter.scale * _product(adapter, first, last)
    addition = rows.view(-1)[start - first * columns : stop - first * columns]
    return (part.float() + addition.view(part.shape)).to(part.dtype)


def _product(adapter: Adapter, first: int, last: int) -> Tensor:
    """Rows `first` ≤ row < `last` of B·A; those of experts lie one after another."""
    if adapter.up.dim() == 2:
        return adapter.up[first:last] @ adapter.down
    per_expert = adapter.up.shape[1]
    begin = first // per_expert
    experts = slice(begin, -(-last // per_expert))
    rows = (adapter.up[experts] @ adapter.down[experts]).flatten(0, 1)
    return rows[first - begin * per_expert : last - begin * per_expert]


class _Matrix(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class ExpertDelta(nn.Module):
    """A and B of one weight of experts, with the names and the scale that peft gives those of a linear layer."""

    def __init__(self, shape: Sequence[int], like: Tensor, lora: LoraConfig) -> None:
        super().__init__()
        num_experts, rows, columns = shape
        down = torch.empty(num_experts, lora.rank, columns, dtype=like.dtype)
        for one in down:
            nn.init.kaiming_uniform_(one, a=5**0.5)  # as peft's
        self.lora_A = nn.ModuleDict({_NAME: _Matrix(down)})
        self.lora_B = nn.ModuleDict({_NAME: _Matrix(torch.zeros(num_experts, rows, lora.rank, dtype=like.dtype))})
        self._scale = lora.alpha / lora.rank
        self.scaling = {_NAME: self._scale}

    def set_scale(self, name: str, factor: float) -> None:
        """Set s to so many times alpha / rank."""
        self.scaling[name] = factor * self._scale

    def forward(self) -> Tensor:
        """`[E, rows, columns]`: s·B·A."""
        down, up = (self.get_parameter(f"lora_{part}.{_NAME}.weight") for part in "AB")
        return self.scaling[_NAME] * (up @ down)


def adapt_experts(causal_lm: nn.Module, names: Sequence[str], lora: LoraConfig) -> None:
    """Let modules of experts compute with W + s·B·A in place of the weights of these names."""
    owned: dict[str, list[str]] = {}
    for name in names:
        owner, _, own = name.rpartition(".")
        owned.setdefault(owner, []).append(own)
    for owner, weights in owned.items():
        experts = causal_lm.get_submodule(owner)
        for own in weights:
            weight = experts.get_parameter(own)
            delta = ExpertDelta(getattr(weight, "ds_shape", weight.shape), weight, lora)
            experts.add_module(f"{_OF_EXPERTS[1:]}{own}", delta)
        vars(experts)["forward"] = partial(_with_deltas, experts, tuple(weights), experts.forward)


def _with_deltas(
    experts: nn.Module, weights: Sequence[str], own: Callable[..., Tensor], *args: Any, **settings: Any
) -> Tensor:
    """The module's own computation, in which some of its parameters are others."""
    held = {name: experts._parameters.pop(name) for name in weights}  # noqa: SLF001 - a parameter hides no attribute
    try:
        for name, weight in held.items():
            vars(experts)[name] = weight + experts.get_submodule(f"{_OF_EXPERTS[1:]}{name}")()
        return own(*args, **settings)
    finally:
        for name, weight in held.items():
            del vars(experts)[name]
            experts._parameters[name] = weight  # noqa: SLF001


def load_adapted_policy(
    lora: LoraConfig, seed: int, path: str, model: ModelConfig, *, gradient_checkpointing: bool
) -> PolicyModel:
    """`load_policy`, frozen, with adapters that are the same for a seed on every rank and backend.

    Raises:
        ConfigError: If a target is no linear layer of it.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    policy = load_policy(path, model, gradient_checkpointing=gradient_checkpointing)
    causal_lm = policy.causal_lm
    linear, experts = linear_layers(causal_lm), expert_weights(causal_lm)
    of_experts = [name for name in experts if lora.adapts_experts(name)]
    if violations := unmatched_targets([*linear, *of_experts], lora.targets):
        raise ConfigError(violations)
    of_linear = [target for target in lora.targets if not unmatched_targets(linear, [target])]
    causal_lm.requires_grad_(requires_grad=False)
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=of_linear,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if of_linear:
            inject_adapter_in_model(settings, causal_lm)
        adapt_experts(causal_lm, of_experts, lora)
    return policy


def save_adapter(causal_lm: Any, adapters: dict[str, Adapter], folder: Path) -> None:
    """Write the adapters as `peft.PeftModel.from_pretrained` reads them."""
    from safetensors.torch import save_file

    causal_lm.peft_config[_NAME].save_pretrained(folder)
    tensors = {}
    for name, adapter in adapters.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{layer}.lora_A.weight"] = adapter.down.cpu()
        tensors[f"{layer}.lora_B.weight"] = adapter.up.cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
