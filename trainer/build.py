"""Wire one trainer rank: backend by name, settings from the configuration."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import torch

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import POLICY, PolicyId
from penstock.trainer.algorithms.rules import algorithm_violations
from penstock.trainer.backend import Backend
from penstock.trainer.batches.sequences import ModelKind
from penstock.trainer.config import AlgorithmConfig, CriticConfig, TrainerConfig
from penstock.trainer.critic import Critic
from penstock.trainer.lora import load_adapted_policy
from penstock.trainer.passes import StepSettings
from penstock.trainer.policy_model import load_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.torch_backend import Loader, build_torch_backend
from penstock.trainer.validation import trainer_violations
from penstock.trainer.value_model import load_value_model
from penstock.trainer.work import Work, peak_flops
from penstock.weights.model_config import ModelConfig, ModelShape


def build_trainer(
    model_path: str,
    model: ModelConfig,
    trainer: TrainerConfig,
    algorithm: AlgorithmConfig,
    *,
    rank: int,
    world_size: int,
    master_port: int,
    device: str,
    threads: int,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    master_addr: str = "127.0.0.1",
    critic: CriticConfig | None = None,
    kind: ModelKind = "policy",
    policy_id: PolicyId = POLICY,
) -> PolicyTrainer:
    """Build this process's rank. Collective: with more than one rank, all must be building at once.

    Sets the process's thread count and, for DeepSpeed, `RANK` and the other variables of the process group.

    Args:
        model_path: Directory or hub name of the starting weights.
        model: Shape, precision and attention of the policy.
        trainer: Backend, ZeRO stage, optimizer, token budget.
        algorithm: Advantage, loss, correction, aggregation.
        rank: This process, 0 ≤ rank < world_size.
        world_size: Ranks in all.
        master_port: Free port on rank 0's node.
        device: `cpu` or `cuda`; the process sees only its own accelerator.
        threads: CPU threads of this process.
        seed: Of torch's generator.
        temperature: Sampling temperature.
        max_new_tokens: Sampling limit, tokens.
        master_addr: Address of rank 0's node.
        critic: Of gae.
        kind: A reward model begins with the body of the policy at `model_path` and a head of zeros.
        policy_id: Which of the policies of a run it is.

    Raises:
        ConfigError: If the settings cannot run together, or the model cannot be loaded.
    """
    violations = trainer_violations(model, trainer) + [one.message for one in algorithm_violations(algorithm)]
    if algorithm.needs_critic and critic is None:
        violations.append(f"algorithm.advantage={algorithm.advantage} needs a critic, and there is none. Give one.")
    if trainer.lora is not None and kind == "reward":
        violations.append("trainer.lora with a reward model: its head starts at zero and has no adapter. Use null.")
    if violations:
        raise ConfigError(violations)
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # transformers imports deepspeed's accelerator probe, which warns without
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if trainer.backend == "deepspeed":
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }
    load: Loader = load_policy if kind == "policy" else load_value_model
    if trainer.lora is not None:
        load = partial(load_adapted_policy, trainer.lora, seed)
    backend = _build_backend(load, model_path, model, trainer, device)
    settings = StepSettings(
        max_tokens_per_micro_batch=trainer.max_group_tokens,
        attention_share=attention_share(model.shape),
        attention=model.attention,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        kind=kind,
        policy_id=policy_id,
        share_prompts=trainer.share_prompts,
    )
    device_name = torch.cuda.get_device_name(backend.device) if device == "cuda" else None
    work = Work(model.shape, trainer.num_ranks, peak_flops(device_name, model.dtype))
    if critic is None or not algorithm.needs_critic:
        return PolicyTrainer(backend, algorithm, trainer.optimizer, settings, work)
    its_trainer = trainer.model_copy(update={"optimizer": critic.optimizer})
    its_backend = _build_backend(load_value_model, critic.path or model_path, model, its_trainer, device)
    judge = Critic(its_backend, algorithm, critic.optimizer, settings, work)
    return PolicyTrainer(backend, algorithm, trainer.optimizer, settings, work, judge)


def _build_backend(load: Loader, path: str, model: ModelConfig, trainer: TrainerConfig, device: str) -> Backend:
    """A model with its optimizer, by `trainer.backend`."""
    if trainer.backend == "torch":
        return build_torch_backend(load, path, model, trainer, device)
    from penstock.trainer.deepspeed_backend import build_deepspeed_backend

    return build_deepspeed_backend(load, path, model, trainer, device=device, timeout_s=trainer.step_timeout_s)


def attention_share(shape: ModelShape) -> float:
    """Attention products per token and token of context, relative to those with weights.

    `a = 4 · layers · heads · head_dim / (2 · weights outside embeddings)`: QKᵀ and AV over one multiply-add per weight.
    """
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    weights = shape.num_parameters - embeddings
    return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim / weights


def save_policy(trainer: PolicyTrainer, path: str, tokenizer_source: str) -> None:
    """Write the policy with its tokenizer in Hugging Face form, and its critic beside it, as `critic`. Collective.

    Each is written under another name and renamed when it is complete, so that a process that is killed meanwhile
    leaves what was there before, and nothing that looks like a policy.

    Args:
        trainer: This rank's trainer.
        path: Directory to write; created, or replaced.
        tokenizer_source: Where the tokenizer is: the directory or hub name the policy was loaded from.
    """
    backends = {path: trainer.backend}
    if trainer.critic is not None:
        backends[str(Path(path).with_name("critic"))] = trainer.critic.backend
    for folder, backend in backends.items():
        target = Path(folder)
        unfinished = target.with_name(f"{target.name}.unfinished")
        if backend.rank == 0 and unfinished.exists():
            shutil.rmtree(unfinished)
        backend.save_hf(str(unfinished))
        if backend.rank == 0:
            _copy_tokenizer(tokenizer_source, unfinished)
            if target.exists():
                shutil.rmtree(target)
            unfinished.rename(target)


def _copy_tokenizer(source: str, target: Path) -> None:
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
