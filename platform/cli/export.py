"""`penstock export`: the policy of a run as a model folder with a model card, or on the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from penstock import __version__
from penstock.dataflow.errors import ConfigError, PenstockError, boundary
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import BEST_FILE, ENVIRONMENT_FILE, POLICY_FOLDER, SUMMARY_FILE
from penstock.platform.run.checkpoint import Checkpoint, CheckpointFolder, choose_checkpoint
from penstock.platform.run.run_dir import read_json
from penstock.platform.run.saved_config import changed_config, enter_folder_of, read_saved_config
from penstock.rollout.tokenization.tokenizers import load_codec

if TYPE_CHECKING:
    import torch

    from penstock.trainer.policy_trainer import HeldWeights, PolicyTrainer

HUB = "hub:"
CARD = "README.md"
GENERATION_CONFIG_FILE = "generation_config.json"
USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (one.from_pretrained("DIR") for one in (AutoModelForCausalLM, AutoTokenizer))
```

```bash
vllm serve DIR
```
"""
"""How to use a model folder, for its card."""


def run_export(run_dir: Path, target: str, step: int | None, console: Console, *, best: bool = False) -> int:
    """Write the policy of a run to a folder, or upload it; returns the exit code.

    Args:
        run_dir: Run directory.
        target: Folder that does not exist, or `hub:OWNER/NAME`.
        step: Step of the policy; None is the newest one, of those that the run has saved at its end or as a checkpoint.
        console: Told what was written.
        best: Take the step of the best evaluation of a run with `evaluation.keep_best`.

    Raises:
        ConfigError: If the directory holds no run, or the folder exists, or no evaluation is known to be the best.
        CheckpointError: If there is no complete checkpoint to export.
        PenstockError: If the Hub refuses it.
    """
    run_dir = run_dir.resolve()
    config = changed_config(read_saved_config(run_dir), [], run_dir)
    if best:
        step = best_step(run_dir, step)
    if target.startswith(HUB):
        with tempfile.TemporaryDirectory() as temporary:
            policy = Path(temporary) / POLICY_FOLDER
            version = _write(config, run_dir, step, policy)
            url = upload(policy, target.removeprefix(HUB), version)
        console.print(f"policy of step {version} uploaded to {url} (private; change that on its page)")
        return 0
    if problems := existing(Path(target)):
        raise ConfigError(problems)
    version = _write(config, run_dir, step, Path(target).absolute())
    console.print(f"policy of step {version} written to {target}")
    return 0


def existing(to: Path) -> list[str]:
    """What is wrong with the folder that `--to` names, if it exists."""
    return [f"--to {to}: it exists. Give a folder that does not, so that nothing is lost."] if to.exists() else []


def best_step(run_dir: Path, step: int | None) -> int:
    """Step of the best evaluation of a run.

    Raises:
        ConfigError: If a step was given, too, or the run has kept no best policy.
    """
    if step is not None:
        raise ConfigError([f"--best --step {step}: the two name different policies. Give one of them."])
    found: int | None = read_json(run_dir / BEST_FILE).get("step")
    if found is None:
        raise ConfigError(
            [
                f"--best: {run_dir} has no {BEST_FILE}. A run with evaluation.keep_best=true writes it with its first "
                "evaluation after a step; leave --best out for the newest policy."
            ]
        )
    return found


def upload(folder: Path, name: str, version: int) -> str:
    """Upload a model folder to the Hub, into a private repository that is made if it is missing; returns its address.

    Raises:
        PenstockError: If the Hub cannot be reached or refuses it.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    with boundary(PenstockError, f"--to {HUB}{name}: `hf auth login` gives the right to write"):
        hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Policy of step {version}")
    return f"https://huggingface.co/{name}"


def _write(config: RunConfig, run_dir: Path, step: int | None, target: Path) -> int:
    """Write the policy and its card; returns its version. The folder appears when it is complete."""
    facts = read_json(run_dir / SUMMARY_FILE)
    version, checkpoint = policy_of(run_dir, step)
    if version is None:
        raise ConfigError(
            [f"{run_dir}: its policy has no step, and is a model folder already: {run_dir / POLICY_FOLDER}"]
        )
    unfinished = target.with_name(f"{target.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    if checkpoint is None:
        shutil.copytree(run_dir / POLICY_FOLDER, unfinished)
    else:
        enter_folder_of(run_dir)
        export_policy(config, checkpoint.path, unfinished)
    packages = read_json(run_dir / ENVIRONMENT_FILE).get("packages", {})
    best = read_json(run_dir / BEST_FILE)
    (unfinished / CARD).write_text(model_card(config, facts, packages, version, best), encoding="utf-8")
    name_ends(config, unfinished)
    unfinished.rename(target)
    return version


def name_ends(config: RunConfig, folder: Path) -> None:
    """Name all tokens that ended the answers of a run in the folder of its policy, for programs that ask no template.

    Without it a policy that has learned to end as its chat template does would run on where only eos ends an answer.
    """
    codec = load_codec(folder, config.env)
    ends = sorted({*codec.stop_token_ids, *config.rollout.sampling.stop_token_ids})
    if ends != list(codec.named_ends):
        path = folder / GENERATION_CONFIG_FILE
        path.write_text(json.dumps(read_json(path) | {"eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


class PolicyOfRun(NamedTuple):
    """Where the policy of a run is."""

    version: int | None
    """Its step; None: `penstock sft` has written it."""
    checkpoint: Checkpoint | None
    """It has to be written from this one; None: it is in the folder `policy`."""


def policy_of(run_dir: Path, step: int | None) -> PolicyOfRun:
    """The policy of a step of a run; None is the newest one.

    Raises:
        CheckpointError: If it is neither in the folder `policy` nor in a complete checkpoint.
    """
    if (run_dir / POLICY_FOLDER / "config.json").is_file():
        version = read_json(run_dir / SUMMARY_FILE).get("policy_version")
        newest = max(CheckpointFolder(run_dir).versions(), default=None)
        is_newest = newest is None or (version is not None and version >= newest)
        if is_newest if step is None else step == version:
            return PolicyOfRun(version, None)
    checkpoint = choose_checkpoint(run_dir, step)
    return PolicyOfRun(checkpoint.version, checkpoint)


def export_policy(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Write the policy of a checkpoint in Hugging Face form, on the CPU of this process, whatever trained it.

    It is read in float32, as the checkpoint has it, and written in the run's type, as its engines had it.

    Args:
        config: Configuration of the run.
        checkpoint: Folder of the checkpoint.
        target: Folder to write.
    """
    from penstock.platform.cluster.actor_factory import trainer_spec
    from penstock.trainer.build import build_trainer, save_policy
    from penstock.weights.dtypes import TORCH_DTYPES

    spec = trainer_spec(config)
    one_rank = spec.trainer.model_copy(
        update={"backend": "torch", "num_ranks": 1, "tensor_parallel_size": 1, "sequence_parallel_size": 1}
        | {"max_tokens_per_micro_batch": spec.trainer.max_group_tokens}
        | {"zero_stage": 0, "fsdp_copies": 1, "expert_parallel": False, "deepspeed": {}}
        | {"compile": False, "offload_optimizer": False, "offload_parameters": False}
    )
    in_float32 = spec.model.model_copy(update={"dtype": "float32"})
    spec = replace(spec, model=in_float32, trainer=one_rank, device="cpu", restore_from=str(checkpoint))
    trainer = build_trainer(spec)
    try:
        trainer.restore(str(checkpoint))
        save_policy(trainer, str(target), spec.model_path, [_rounded(trainer, TORCH_DTYPES[config.model.dtype])])
    finally:
        trainer.close()


def _rounded(trainer: PolicyTrainer, dtype: torch.dtype) -> HeldWeights:
    """The weights of the trained models in a type; adapters, which are merged in float32, as they are."""
    held = trainer.held_weights()
    return {
        prefix: {
            **held[prefix],
            **{name: held[prefix][name].to(dtype) for name, _ in backend.training_sharding().tensors},
        }
        for prefix, backend in trainer.backends().items()
    }


def model_card(
    config: RunConfig,
    summary: dict[str, Any],
    packages: dict[str, str],
    version: int,
    best: dict[str, Any] | None = None,
) -> str:
    """The facts of the run, and how to use the model, as a model card in Markdown.

    Args:
        config: Configuration of the run.
        summary: Content of `summary.json`; empty if the run has not ended.
        packages: Versions of the packages that trained it.
        version: Step of the policy.
        best: Content of `best.json`, if the run has one.
    """
    front = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [penstock, reinforcement-learning]"]
    if (base := _hub_name(config)) is not None:
        front.insert(0, f"base_model: {base}")
    rows = "\n".join(
        f"| {name} | {told} |" for name, told in _card_rows(config, summary, packages, version, best or {})
    )
    adapter = "\n`adapter/` holds the adapters alone, for `peft`.\n" if config.trainer.lora else ""
    return (
        "---\n" + "\n".join(front) + f"\n---\n\n# {config.name}, step {version}\n\n"
        f"Trained by reinforcement learning with Penstock {summary.get('version', __version__)}.\n\n"
        f"| | |\n|---|---|\n{rows}\n{adapter}\n"
        f"{USAGE}\n"
        "It was trained on the tasks named above only; nothing was measured beyond them. The license of the base model "
        "and of the data holds for it.\n"
    )


def _card_rows(
    config: RunConfig, summary: dict[str, Any], packages: dict[str, str], version: int, best: dict[str, Any]
) -> Iterator[tuple[str, object]]:
    flow, algorithm, sampling = config.dataflow, config.algorithm, config.rollout.sampling
    yield "base model", _hub_name(config) or "a local one"
    yield "algorithm", f"{algorithm.advantage.name} with {algorithm.loss.name}"
    yield "environment", config.env.factory
    yield "reward", config.reward.fn or ", ".join(config.reward.parts)
    yield "batch", f"{flow.batch_groups} groups of {flow.group_size}, max_staleness {flow.max_staleness}"
    yield "learning rate", config.trainer.optimizer.lr
    limits = [
        f"{name} {value:g}"
        for name, value, whole in (
            ("top_k", sampling.top_k, 0),
            ("top_p", sampling.top_p, 1),
            ("min_p", sampling.min_p, 0),
        )
        if value != whole
    ]
    drawn = ", ".join([f"temperature {sampling.temperature:g}", *limits])
    yield "sampling in training", f"{drawn}, at most {sampling.max_new_tokens} new tokens"
    yield "adapters", f"LoRA of rank {config.trainer.lora.rank}, merged" if config.trainer.lora else "none"
    yield "seed", config.seed
    yield "steps", f"{version} of {config.total_steps}"
    accuracy = reward_mean = None
    kind = summary.get("evaluated_on") or "held-out"
    if version == summary.get("policy_version"):
        accuracy, reward_mean = summary.get("eval_after"), summary.get("eval_reward_after")
    elif version == best.get("step"):
        accuracy, reward_mean = best["accuracy"], best["reward_mean"]
    if accuracy is not None:
        yield f"{kind} accuracy", _change(summary.get("eval_before"), accuracy)
    if reward_mean is not None:
        yield f"{kind} reward", _change(summary.get("eval_reward_before"), reward_mean)
    prompts = summary.get("skipped_prompts", {})
    if accuracy is not None and prompts.get("held_out"):
        total = prompts["evaluated"] + prompts["held_out"]
        yield "held-out tasks", f"{prompts['evaluated']} of {total}; the other prompts are too long to be answered"
    if packages:
        yield "packages", ", ".join(f"{name} {number}" for name, number in sorted(packages.items()))


def _change(before: float | None, after: float) -> str:
    return f"{'not measured' if before is None else f'{before:.3f}'} before, {after:.3f} after"


def _hub_name(config: RunConfig) -> str | None:
    """Name of the base model on the Hub; None for a folder, whose path says nothing to others."""
    path = config.model.path
    return None if path is None or path.startswith((".", "/", "~")) or Path(path).exists() else path
