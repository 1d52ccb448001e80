"""Checks of adapters (LoRA): what they are trained with, their reference, and whether the model has their targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.validation import unmatched_targets


def check_no_lora(config: RunConfig) -> Iterator[Finding]:
    """A reward model is trained whole."""
    if config.trainer.lora is not None:
        yield error(
            "trainer.lora with `penstock rm`: a reward model begins with a new head, which must be trained whole. Use "
            "trainer.lora=null.",
            "trainer.lora",
        )


def check_lora_reference(config: RunConfig) -> Iterator[Finding]:
    """The reference of adapters is the policy itself."""
    reference = config.reference
    is_own = config.trainer.lora is not None and reference.path is None and config.algorithm.needs_reference
    if is_own and (reference.pool is not None or reference.num_workers > 1):
        yield warning(
            f"reference.pool={reference.pool} and reference.num_workers={reference.num_workers} have no effect with "
            "trainer.lora and reference.path=null: the trainer itself is the reference, without its adapters.",
            "reference",
            "trainer.lora",
        )


def check_lora_targets(config: RunConfig, directory: Path) -> Iterator[Finding]:
    """Targets are linear layers of the checkpoint in `directory`."""
    lora = config.trainer.lora
    if lora is not None and (layers := _linear_layers(directory)):
        yield from (error(message, "trainer.lora", "model.path") for message in unmatched_targets(layers, lora.targets))


def _linear_layers(directory: Path) -> list[str]:
    """By the names and shapes of its tensors; nothing is loaded."""
    layers = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                layer = name.removesuffix(".weight")
                is_linear = layer != name and len(file.get_slice(name).get_shape()) == 2
                if is_linear and not layer.endswith(("embed_tokens", "lm_head")):
                    layers.append(layer)
    return layers
