"""Checks against this machine: policy files, GPU driver, free memory and disk space. Nothing is started.

Missing resources are `absent` findings: errors in a run, but warnings in a dry run, which may use another machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from penstock.platform.checks.run_dir import is_finished, occupied
from penstock.platform.cluster import hardware
from penstock.platform.cluster.memory import GIB, published_gib, shared_gib, trained_state_gib
from penstock.platform.cluster.placement import host_load_gib, plan_placement
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, weight_route
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, absent, error, warning
from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.config.schema import FROZEN_ROLES, RunConfig
from penstock.platform.metrics.run_files import CONFIG_FILE
from penstock.trainer.validation import unmatched_targets
from penstock.weights.transport.allocator import expandable_segments
from penstock.weights.transport.shared_memory import remove_abandoned_directories

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_WARM_START = re.compile(r"^runs/(?P<experiment>\w+_sft)-seed(?P<seed>\d+)/policy$")
"""Path that conf/model/ uses for the policy trained by a configuration of conf/experiment/."""
_SHAPE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_word_embeddings",
    "num_experts": "num_experts",
    "moe_intermediate_size": "expert_size",
    "shared_expert_intermediate_size": "shared_expert_size",
}
_SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys")
_LOG_GIB = 0.5
"""Metrics, sampled trajectories, reports and Ray's logs of one run, GiB."""


def check_machine(config: RunConfig, command: Command, *, is_resumed: bool = False) -> Iterator[Finding]:
    """Check all resources of this machine that `command` needs. The pools of the configuration must exist.

    Args:
        config: The configuration.
        command: The command that uses it.
        is_resumed: Whether the run continues in its own directory.
    """
    yield from check_model_paths(config, command)
    if command != "eval":
        if not is_resumed and not (config.resume == "auto" and (Path(config.run_dir) / CONFIG_FILE).exists()):
            yield from check_run_dir(config)
        yield from check_disk(config, command)
    if config.cluster.address == "local":
        yield from check_threads(config)
        yield from check_driver(config, command)
        yield from check_free_memory(config, command)
        if command not in WITHOUT_ENGINES:
            yield from check_shared_memory(config)


def check_run_dir(config: RunConfig) -> Iterator[Finding]:
    """Check that the run directory is new, empty or may be overwritten, and that it is writable."""
    path = Path(config.run_dir)
    if reason := unusable_path(config.run_dir):
        yield error(f"run_dir={config.run_dir!r:.100} {reason}", "name")
        return
    if path.resolve() in (Path.cwd(), *Path.cwd().parents):
        yield error(
            f"run_dir={path} is the working directory or contains it: a run owns its directory, and overwrite=true "
            "would delete it. Use e.g. runs/${name}."
        )
        return
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        yield error(f"run_dir={path}: {existing} is a file. Use a new name=... or another run_dir.")
    elif not os.access(existing, os.W_OK):
        yield error(f"run_dir={path} cannot be written: no permission in {existing}. Use another run_dir.")
    elif config.sft is not None and config.sft.reuse and is_finished(config):
        return
    elif refusal := occupied(config):
        yield error(refusal, "run_dir", "name", "overwrite")


def unusable_path(path: str) -> str:
    """Return why no run can be written to a path, whatever the machine has there; empty if nothing speaks against it.

    Files that exist are not looked at.
    """
    if path.startswith("~"):
        return (
            "begins with ~, which only a shell replaces by your home directory: a folder of the name ~ would be made "
            'here. Write run_dir="$HOME/...".'
        )
    folder = next((one for one in _SYSTEM_FOLDERS if Path(path).absolute().is_relative_to(one)), None)
    if folder is not None and not Path(path).absolute().is_relative_to("/dev/shm"):  # noqa: S108 - a disk in memory
        return f"is in {folder}, which belongs to the operating system. Use a folder of your own."
    return ""


def check_model_paths(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that models are directories with a config.json of the stated shape, or hub names in the local cache."""
    if command == "train" and awaits_warm_start(config):
        yield warning(
            f"model.path={config.model.path} does not exist yet: `penstock sft {' '.join(config.warm_start or ())}` "
            "creates it first (warm_start).",
            "warm_start",
        )
    elif config.model.path is not None and not config.model.from_scratch:
        yield from check_model_path(config, "model.path", config.model.path)
    if command == "train" and config.partner is not None and config.partner.model.path is not None:
        yield from check_model_path(config.partner_view, "partner.model.path", config.partner.model.path)
        yield from check_tokenizer(config, "partner.model.path", config.partner.model.path)
    auxiliary = [(f"{role}.path", config.frozen(role).path) for role in FROZEN_ROLES if config.num_frozen(role)]
    if config.algorithm.needs_critic:
        auxiliary.append(("critic.path", config.critic.path))
    for key, path in auxiliary if command == "train" else ():
        if path is not None:
            yield from check_model_path(config, key, path)
            yield from check_tokenizer(config, key, path)


def awaits_warm_start(config: RunConfig) -> bool:
    """Whether the policy still has to be created by the warm start."""
    path, is_named = config.model.path, config.warm_start is not None
    return is_named and path is not None and not (Path(path).expanduser() / "config.json").exists()


def check_model_path(config: RunConfig, key: str, path: str) -> Iterator[Finding]:
    directory = Path(path).expanduser()
    if directory.is_dir():
        yield from _check_checkpoint(config, key, directory)
    elif directory.exists():
        yield error(f"{key}={path} is a file. Give the directory that holds config.json and weights.")
    elif (maker := _WARM_START.match(path)) and (CONF_DIR / "experiment" / f"{maker['experiment']}.yaml").is_file():
        yield absent(
            f"{key}={path} does not exist: there is no policy to start from. Create it with "
            f"`penstock sft experiment={maker['experiment']} seed={maker['seed']}`, or give {key}=DIR of one that you "
            "have."
        )
    elif not _HUB_NAME.match(path) or (directory.parent not in (Path(), directory) and directory.parent.is_dir()):
        yield absent(f"{key}={path} does not exist. Give a model directory or a hub name.", "seed")
    else:
        # The model cache of huggingface_hub, located by its own environment variables.
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        cache = Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")).expanduser()
        if not any(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json")):
            yield absent(
                f"{key}={path} does not exist: it is neither a directory nor in the local Hugging Face cache "
                f"({cache}), and all processes would download it at once. Download it first: `hf download {path}`.",
                "seed",
            )


def check_threads(config: RunConfig) -> Iterator[Finding]:
    """Warn of more threads in one process on a CPU pool than this machine has CPUs."""
    cluster, num_cpus = config.cluster, os.cpu_count() or 1
    has_cpu_pool = any(cluster.pools[name].device == "cpu" for name in (cluster.trainer_pool, cluster.rollout_pool))
    if has_cpu_pool and cluster.threads_per_process > num_cpus:
        yield warning(
            f"cluster.threads_per_process={cluster.threads_per_process}, but this machine has {num_cpus} CPUs: the "
            f"threads of each process wait for one another. Use at most {num_cpus}."
        )


def check_driver(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that GPU pools have a driver, the CUDA build of torch and enough devices."""
    on_gpus = (placement.pool for placement in plan_placement(config, command) if placement.device == "gpu")
    used = {name: config.cluster.pools[name] for name in on_gpus if name is not None}
    if not used:
        return
    if not hardware.has_nvidia_driver():
        yield absent(
            f"cluster.pools.{next(iter(used))}.device=gpu, but this machine has no NVIDIA driver (neither nvidia-smi "
            "nor /proc/driver/nvidia answers). Install the driver, use a machine that has one, or cluster=local_cpu."
        )
        return
    if hardware.is_cpu_build():
        yield absent(
            "cluster: the pools are GPU, but the installed torch is the CPU build and would not see them. Run "
            "`make setup FLAVOR=cuda` in a fresh environment."
        )
    wanted, found = sum(pool.count for pool in used.values()), hardware.num_nvidia_gpus()
    if found is not None and found < wanted:
        yield absent(
            f"cluster.pools: {wanted} GPUs are configured, but nvidia-smi lists {found}. Lower count, or use another "
            "machine.",
            "cluster",
        )


def check_free_memory(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check the estimated memory of all processes against the free memory."""
    needed, free = host_load_gib(plan_placement(config, command)), hardware.available_memory_bytes() / GIB
    if needed > free:
        yield absent(
            f"memory: the run needs about {needed:.1f} GiB of main memory, but {free:.1f} GiB are free: the kernel "
            "would kill processes. Stop other programs, or use fewer engines, ranks or reward workers, or a smaller "
            "trainer.max_tokens_per_micro_batch.",
            *("model", "trainer", "rollout", "cluster", "reward.num_workers"),
        )


def check_disk(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check that checkpoints, the policy and logs fit on the disk of the run directory."""
    checkpoint = config.checkpoint
    takes_any = command == "train" and (checkpoint.every_steps or checkpoint.every_minutes)
    count = checkpoint.keep + 1 if takes_any else 0  # a new one is complete before an old one is removed
    needed = published_gib(config) + count * trained_state_gib(config) + _LOG_GIB
    free = hardware.free_disk_bytes(Path(config.run_dir)) / GIB
    if needed > free:
        yield absent(
            f"run_dir={config.run_dir}: the policy, {count} checkpoints and logs need about {needed:.1f} GiB of disk, "
            f"{free:.1f} GiB are free: the run could not save its work. Free some, use another run_dir, or a smaller "
            "checkpoint.keep.",
            *("run_dir", "name", "checkpoint", "model", "total_steps"),
        )


def check_shared_memory(config: RunConfig) -> Iterator[Finding]:
    """Check that two published versions fit in shared memory, the new one and the one that is still being read."""
    route, has_gpus = weight_route(config), config.cluster.pools[config.cluster.rollout_pool].device == "gpu"
    if route in DEVICE_BUFFER_ROUTES and has_gpus and (refusal := expandable_segments(os.environ)):
        yield error(refusal, "weights.transport")
    if route in (*DEVICE_BUFFER_ROUTES, "live_parameters"):
        return
    folder = Path(config.weights.directory or hardware.SHARED_MEMORY)
    if not folder.is_dir():
        if config.weights.directory:
            yield error(f"weights.directory={folder} is not a folder. Create it on every node.")
        return
    needed = shared_gib(config) if route == "adapters" else 2 * published_gib(config)
    remove_abandoned_directories(folder)  # runs that were killed may have left versions there
    free = hardware.free_disk_bytes(folder) / GIB
    if needed > free:
        yield absent(
            f"weights.directory: two versions of the policy need {needed:.2f} GiB in {folder}, but {free:.2f} GiB are "
            "free. Enlarge it (containers: --shm-size), or set weights.directory to a folder on a disk.",
            "model",
        )


def _check_checkpoint(config: RunConfig, key: str, directory: Path) -> Iterator[Finding]:
    """Check that a directory holds a model of the stated shape; of auxiliary models only the vocabulary is compared."""
    path = directory / "config.json"
    if not path.exists():
        yield error(f"{key}={directory} has no config.json: it is not a Hugging Face model directory.")
        return
    if key == "model.path":
        yield from check_lora_targets(config, directory)
    checkpoint: dict[str, Any] = json.loads(path.read_text())
    shape = "partner.model.shape" if key == "partner.model.path" else "model.shape"
    is_trained = key in ("model.path", "partner.model.path")
    for theirs, name in _SHAPE_KEYS.items():
        found, stated = checkpoint.get(theirs), getattr(config.model.shape, name)
        if found is None or found == stated or (not is_trained and name != "vocab_size"):
            continue
        why = (
            "layouts and memory estimates start from the shape. Copy the checkpoint's."
            if is_trained
            else "it would misread the policy's tokens. Use a model with the policy's tokenizer."
        )
        yield error(
            f"{shape}.{name}={stated} differs from the checkpoint's {theirs}={found} ({key}, {path}): {why}", key
        )


def check_tokenizer(config: RunConfig, key: str, path: str) -> Iterator[Finding]:
    """Check that every token has the same id in both tokenizers, if both models are directories with one."""
    ours, theirs = _token_ids(config.model.path), _token_ids(path)
    if not ours or not theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        example = differing[0]
        yield error(
            f"{key}={path}: {len(differing)} of {len(ours | theirs)} tokens have a different id than in the policy's "
            f"tokenizer, e.g. {example!r} {theirs.get(example, 'none')} instead of {ours.get(example, 'none')}: it "
            "would misread the policy's tokens. Use a model with the policy's tokenizer.",
            "model.path",
        )


def _token_ids(path: str | None) -> dict[str, int]:
    """Token -> id from the `tokenizer.json` of a model directory; empty if it is missing or has another format."""
    file = Path(path or "").expanduser() / "tokenizer.json"
    if path is None or not file.is_file():
        return {}
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens", [])}
    return (dict(vocabulary) if isinstance(vocabulary, dict) else {}) | added


def check_lora_targets(config: RunConfig, directory: Path) -> Iterator[Finding]:
    """Check that LoRA targets are linear layers of the checkpoint, by names and shapes of its tensors."""
    if config.trainer.lora is None:
        return
    layers = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                layer = name.removesuffix(".weight")
                is_linear = layer != name and len(file.get_slice(name).get_shape()) == 2
                if is_linear and not layer.endswith(("embed_tokens", "lm_head")):
                    layers.append(layer)
    for message in unmatched_targets(layers, config.trainer.lora.targets) if layers else ():
        yield error(message, "model.path")
