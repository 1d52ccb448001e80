"""Wire one trainer rank: backend by name, settings from the configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from penstock.dataflow.errors import ConfigError
from penstock.trainer.algorithms.rules import algorithm_violations
from penstock.trainer.backends.base import Backend
from penstock.trainer.backends.torch import Loader, build_torch_backend
from penstock.trainer.config import TrainerConfig
from penstock.trainer.flops import FlopCounter, peak_flops
from penstock.trainer.models.critic import Critic
from penstock.trainer.models.lora import load_adapted_policy
from penstock.trainer.models.model_form import settings_for
from penstock.trainer.models.policy_model import load_policy
from penstock.trainer.models.value_model import load_value_model
from penstock.trainer.policy_trainer import HeldWeights, PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from penstock.trainer.validation import muon_violations, trainer_violations
from penstock.weights.model_config import ModelConfig


def build_trainer(
    spec: TrainerSpec, rank: int = 0, *, master_addr: str = "127.0.0.1", master_port: int = 0
) -> PolicyTrainer:
    """Build this process's rank. Collective: with more than one rank, all must be building at once.

    Sets the process's thread count and, unless the backend is `torch`, `RANK` and the other variables of the process
    group. A reward model begins with the body of the policy at `spec.model_path` and a head of zeros.

    Args:
        spec: What all ranks share; of an accelerator the process sees only its own.
        rank: This process, 0 ≤ rank < `spec.trainer.num_ranks`.
        master_addr: Address of rank 0's node.
        master_port: Free port on it.

    Raises:
        ConfigError: If the settings cannot run together, or the model cannot be loaded.
    """
    model, trainer, algorithm = spec.model, spec.trainer, spec.algorithm
    violations = trainer_violations(model, trainer) + algorithm_violations(algorithm)
    if algorithm.needs_critic and spec.critic is None:
        violations.append(
            f"algorithm.advantage={algorithm.advantage.name} needs a critic, but TrainerSpec.critic is None. Set it."
        )
    if trainer.lora is not None and spec.kind == "reward":
        violations.append("trainer.lora with a reward model: its head starts at zero and has no adapter. Use null.")
    if spec.critic is not None and algorithm.needs_critic:
        violations += muon_violations("critic.optimizer", spec.critic.optimizer, trainer, is_adapted=False)
    if violations:
        raise ConfigError(violations)
    if spec.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # transformers imports deepspeed's accelerator probe, which warns without
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    build_backend: Callable[[Loader, str, ModelConfig, TrainerConfig, str], Backend] = build_torch_backend
    if trainer.backend == "deepspeed":
        from penstock.trainer.backends.deepspeed import build_deepspeed_backend

        build_backend = build_deepspeed_backend
    elif trainer.backend == "fsdp2":
        from penstock.trainer.backends.fsdp2 import build_fsdp2_backend

        build_backend = build_fsdp2_backend
    if trainer.backend != "torch":
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(trainer.num_ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }
    critic_path = (spec.critic and spec.critic.path) or spec.model_path
    # Before DeepSpeed's configuration is set, which transformers looks at wherever it builds a model.
    own = model if critic_path == spec.model_path else settings_for(critic_path, model, spec.device)
    load: Loader = load_policy if spec.kind == "policy" else load_value_model
    if trainer.lora is not None:
        load = partial(load_adapted_policy, trainer.lora, spec.seed)
    backend = build_backend(load, spec.model_path, model, trainer, spec.device)
    device_name = torch.cuda.get_device_name(backend.device) if spec.device == "cuda" else None
    peak, is_adapted = peak_flops(device_name, model.dtype), trainer.lora is not None
    flops = FlopCounter(model.shape, trainer.num_ranks, peak, is_adapted)
    critic = None
    if spec.critic is not None and algorithm.needs_critic:
        critic_trainer = trainer.model_copy(update={"optimizer": spec.critic.optimizer})
        critic_backend = build_backend(load_value_model, critic_path, own, critic_trainer, spec.device)
        critic = Critic(critic_backend, replace(spec, model=own), spec.critic, flops)
    return PolicyTrainer(backend, spec, flops, critic)


def save_policy(
    trainer: PolicyTrainer, path: str, tokenizer_source: str, held: Sequence[HeldWeights] | None = None
) -> None:
    """Write the policy with its tokenizer in Hugging Face form, and its critic next to it, as `critic`. On rank 0.

    Each is written under another name and renamed when it is complete. So a process that is killed meanwhile leaves the
    previous policy, and no incomplete one; between the two renamings, under the name `policy.previous`.

    Args:
        trainer: That of rank 0.
        path: Directory to write; created, or replaced.
        tokenizer_source: Where the tokenizer is: the directory or hub name the policy was loaded from.
        held: `PolicyTrainer.held_weights` of each rank; None: there is only this one.
    """
    held = held or [trainer.held_weights()]
    folders = {"model": Path(path), "critic": Path(path).with_name("critic")}
    for prefix, backend in trainer.backends().items():
        target = folders[prefix]
        unfinished = target.with_name(f"{target.name}.unfinished")
        if unfinished.exists():
            shutil.rmtree(unfinished)
        backend.save_hf(str(unfinished), [one[prefix] for one in held])
        copy_tokenizer(tokenizer_source, unfinished)
        previous = target.with_name(f"{target.name}.previous")
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)  # of a process that was killed here
            target.rename(previous)
        unfinished.rename(target)
        shutil.rmtree(previous, ignore_errors=True)


def copy_tokenizer(source: str, target: Path) -> None:
    """Copy tokenizer files as they are, so that ids cannot change; hub names go through `AutoTokenizer`."""
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        return
    of_model = {"config.json", "model.safetensors.index.json"}
    for file in Path(source).iterdir():
        is_model_file = file.suffix in {".safetensors", ".bin", ".pt"} or file.name in of_model
        if file.is_file() and not is_model_file and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)
