"""LoRA with the layers of peft: loaded weights are frozen, and a low-rank addition to some of them is trained.

    W' = W + s·B·A,  s = alpha / rank;  W [out, in] frozen, A [rank, in] random, B [out, rank] zero at first

So training starts at the loaded policy, gradients and optimizer state exist for A and B only, and with s = 0 the model
is the initial policy, which serves as the reference. Hu et al., arXiv 2106.09685.

The layers are put into the Hugging Face model in place, so its body and head are called as before. There is no
dropout: it would make the trainer's logprobs differ from those of the engines, like staleness does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.dataflow.errors import ConfigError
from penstock.trainer.config import LoraConfig
from penstock.trainer.models.policy_model import PolicyModel, hf_name, load_policy
from penstock.trainer.validation import unmatched_targets
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import linear_layers
from penstock.weights.model_config import ModelConfig

_NAME = "default"
"""peft's name of the only adapter of a layer."""
_DOWN, _UP = ":lora_A", ":lora_B"


class Adapter(NamedTuple):
    """The addition to one weight: scale · up @ down.

    Attributes:
        down: A `[rank, in]`.
        up: B `[out, rank]`.
        scale: s; 0 while it is switched off.
    """

    down: Tensor
    up: Tensor
    scale: float


class Adapters:
    """All adapters of a model; empty (and false) where all of its weights are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Any] = {
            hf_name(f"{name}.weight"): module for name, module in model.named_modules() if hasattr(module, "lora_A")
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

    def copies(self) -> dict[str, Adapter]:
        """HF name of each adapted weight -> a copy of its adapter, float32. Under ZeRO-3 only while gathered."""
        return {
            name: Adapter(
                layer.lora_A[_NAME].weight.detach().float().clone(),
                layer.lora_B[_NAME].weight.detach().float().clone(),
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
    columns, stop = adapter.down.shape[1], start + part.numel()
    first, last = start // columns, -(-stop // columns)
    rows = adapter.scale * (adapter.up[first:last] @ adapter.down)
    addition = rows.view(-1)[start - first * columns : stop - first * columns]
    return (part.float() + addition.view(part.shape)).to(part.dtype)


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
    if violations := unmatched_targets(linear_layers(causal_lm), lora.targets):
        raise ConfigError(violations)
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, causal_lm)
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
