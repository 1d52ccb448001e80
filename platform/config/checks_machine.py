"""Checks against this machine: is the policy there, a driver, room in memory and on disk? Nothing is started.

What a machine lacks is `absent`: an error in a run, a warning in a dry run, which may be made elsewhere.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.platform import hardware
from penstock.platform.config.findings import Command, Finding
from penstock.platform.config.schema import RunConfig
from penstock.platform.memory import GIB, published_gib
from penstock.platform.placement import host_load_gib, plan_placement
from penstock.weights.model_config import ModelShape

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_SHAPE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_word_embeddings",
}
_LOG_GIB = 0.5
"""Metrics, sampled trajectories, reports and Ray's logs of one run, GiB."""


def check_machine(config: RunConfig, command: Command) -> list[Finding]:
    """Everything that `command` needs from this machine. The pools of the configuration must exist."""
    findings = [*check_run_dir(config, command), *check_model_path(config), *check_disk(config, command)]
    if config.cluster.address == "local":
        findings += [*check_driver(config), *check_free_memory(config, command), *check_shared_memory(config, command)]
    return findings


def check_run_dir(config: RunConfig, command: Command) -> list[Finding]:
    """The run directory is new, empty, or may be overwritten; and it can be written."""
    if command == "eval":
        return []
    path = Path(config.run_dir)
    if path.exists() and not path.is_dir():
        return [Finding(f"run_dir={path} is a file. Use a new name=... or another run_dir.", ("run_dir", "name"))]
    if path.is_dir() and any(path.iterdir()) and not config.overwrite:
        return [
            Finding(
                f"run_dir={path} exists and is not empty: a run never mixes with another one's files. "
                "Use overwrite=true to delete it, or a new name=...",
                ("run_dir", "name", "overwrite"),
            )
        ]
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return [Finding(f"run_dir={path} cannot be written: no permission in {existing}. Use another run_dir.", ("run_dir",))]
    return []


def check_model_path(config: RunConfig) -> list[Finding]:
    """The policy is a directory with a config.json of the stated shape, or a hub name in the local cache."""
    path = config.model.path
    if path is None or config.model.from_scratch:
        return []
    keys = ("model.path", "seed", "model.from_scratch")
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            return [Finding(f"model.path={path} has no config.json: it is no Hugging Face model directory.", keys)]
        return _shape_mismatches(config, json.loads((directory / "config.json").read_text()))
    if "arithmetic_sft" in path:
        hint = f"Make it first: `penstock sft experiment=arithmetic_sft seed={config.seed}`."
        return [Finding(f"model.path={path} does not exist: there is no policy to start from. {hint}", keys, "absent")]
    if not _HUB_NAME.match(path):
        return [Finding(f"model.path={path} does not exist. Give a model directory or a hub name.", keys, "absent")]
    if not _is_cached(path):
        return [
            Finding(
                f"model.path={path} is neither a directory nor in the local Hugging Face cache ({_hub_cache()}): every "
                f"process would download it at once. Fetch it first: `hf download {path}`.",
                keys,
                "absent",
            )
        ]
    return []


def check_driver(config: RunConfig) -> list[Finding]:
    """GPU pools need a driver, the CUDA build of torch and enough devices."""
    pools = {name: pool for name, pool in config.cluster.pools.items() if pool.device == "gpu"}
    used = [name for name in (config.cluster.trainer_pool, config.cluster.rollout_pool) if name in pools]
    if not used:
        return []
    keys = ("cluster",)
    if not hardware.has_nvidia_driver():
        return [
            Finding(
                f"cluster.pools.{used[0]}.device=gpu, but this machine has no NVIDIA driver (neither nvidia-smi -L nor "
                "/proc/driver/nvidia answers). Install the driver, use a machine that has one, or cluster=local_cpu.",
                keys,
                "absent",
            )
        ]
    findings = []
    if hardware.is_cpu_build():
        findings.append(
            Finding(
                "cluster: the pools are GPU, but the installed torch is the CPU build and would not see them. "
                "Run `make setup FLAVOR=cuda` in a fresh environment.",
                keys,
                "absent",
            )
        )
    wanted, found = sum(pools[name].count for name in dict.fromkeys(used)), hardware.num_nvidia_gpus()
    if found is not None and found < wanted:
        findings.append(
            Finding(
                f"cluster.pools: {wanted} GPUs are asked for, nvidia-smi lists {found}. Lower count, or use another cluster.",
                keys,
                "absent",
            )
        )
    return findings


def check_free_memory(config: RunConfig, command: Command) -> list[Finding]:
    """The estimate of all processes is within what is free now."""
    needed, free = host_load_gib(plan_placement(config, command)), hardware.available_memory_bytes() / GIB
    if needed <= free:
        return []
    return [
        Finding(
            f"memory: the run needs about {needed:.1f} GiB of main memory, {free:.1f} GiB are free: the kernel would kill "
            "processes. Stop other programs, or use fewer engines, ranks or reward workers, or a smaller "
            "trainer.max_tokens_per_micro_batch.",
            ("model", "trainer", "rollout", "cluster", "reward.num_workers"),
            "absent",
        )
    ]


def check_disk(config: RunConfig, command: Command) -> list[Finding]:
    """The snapshots of the policy and the logs fit on the disk of the run directory."""
    if command == "eval":
        return []
    every = config.checkpoint.every_steps if command == "train" else 0
    snapshots = 1 + (config.total_steps // every if every else 0)
    needed = snapshots * published_gib(config) + _LOG_GIB
    free = hardware.free_disk_bytes(Path(config.run_dir)) / GIB
    if needed <= free:
        return []
    return [
        Finding(
            f"run_dir={config.run_dir}: {snapshots} snapshot(s) and logs need about {needed:.1f} GiB of disk, {free:.1f} GiB "
            "are free: the run would end without its policy. Free some, use another run_dir, or a larger "
            "checkpoint.every_steps.",
            ("run_dir", "name", "checkpoint", "model", "total_steps"),
            "absent",
        )
    ]


def check_shared_memory(config: RunConfig, command: Command) -> list[Finding]:
    """Two published versions, the new and the one still being read, fit in shared memory."""
    if command == "sft" or config.weights.transport != "shared_memory" or not hardware.SHARED_MEMORY.is_dir():
        return []
    needed, free = 2 * published_gib(config), hardware.free_disk_bytes(hardware.SHARED_MEMORY) / GIB
    if needed <= free:
        return []
    return [
        Finding(
            f"weights.transport=shared_memory: two versions of the policy need {needed:.2f} GiB in {hardware.SHARED_MEMORY}, "
            f"{free:.2f} GiB are free. Enlarge it (containers: --shm-size), or use weights=object_store.",
            ("weights.transport", "model"),
            "absent",
        )
    ]


def _shape_mismatches(config: RunConfig, checkpoint: dict[str, Any]) -> list[Finding]:
    """What the YAML states of the shape is what the checkpoint is."""
    return [
        Finding(
            f"model.shape.{name}={stated} differs from the checkpoint's {theirs}={checkpoint[theirs]} "
            f"({config.model.path}/config.json): layouts and memory estimates start from the shape. Copy the checkpoint's.",
            (f"model.shape.{name}", "model.path"),
        )
        for theirs, name, stated in _stated(config.model.shape)
        if checkpoint.get(theirs) is not None and checkpoint[theirs] != stated
    ]


def _stated(shape: ModelShape) -> Iterator[tuple[str, str, int | bool]]:
    """Name in config.json, name of ours, value of ours."""
    ours: dict[str, int | bool] = shape.model_dump()
    return ((theirs, name, ours[name]) for theirs, name in _SHAPE_KEYS.items())


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models, by its own environment variables."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _is_cached(name: str) -> bool:
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/config.json"))
