"""`penstock launch slurm|kuberay|ray`: starts a training run on several nodes, or prints what would start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from penstock.dataflow.errors import ConfigError, PlacementError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.launchers import (
    GRACE_S,
    KILL_RESERVE_S,
    KubeRaySettings,
    LaunchSettings,
    RaySettings,
    SlurmSettings,
    job_submission,
    kuberay_manifest,
    ray_commands,
    slurm_script,
    train_command,
)
from penstock.platform.config.field_errors import descriptions, nearest_choice
from penstock.platform.config.schema import RunConfig

Launcher = Literal["slurm", "kuberay", "ray"]
SETTINGS: dict[Launcher, type[LaunchSettings]] = {
    "slurm": SlurmSettings,
    "kuberay": KubeRaySettings,
    "ray": RaySettings,
}
OWN_KEYS = {"cluster.address": "auto", "resume": "auto"}
"""Keys that a launched run always has: it joins the Ray that is started for it, and continues when it starts again."""
_POLL_S = 2.0
NOTE_S = 60.0
"""Between two messages about nodes that have not joined, seconds."""
_SUBMIT_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher writes, and the command that submits it."""

    text: str
    """The script, manifest or commands."""
    command: Sequence[str]
    """Submits the run."""
    stdin: str = ""
    """What `command` reads; empty if nothing."""


def run_launch(launcher: Launcher, words: Sequence[str], config_dir: Path | None, *, dry_run: bool) -> int:
    """Submit a run, or print what would be submitted; returns the exit code.

    Args:
        launcher: Who starts it.
        words: Overrides of the run, and settings `launch.KEY=VALUE`.
        config_dir: Folder with the user's own YAML.
        dry_run: Print only.

    Raises:
        ConfigError: Listing all violations.
        PlacementError: If it cannot be submitted from here.
    """
    prepared = prepare_launch(launcher, words, config_dir)
    if dry_run:
        sys.stdout.write(prepared.text)
        return 0
    program = prepared.command[0]
    if shutil.which(program) is None:
        raise PlacementError(
            f"{program}: not found on this machine, so the run cannot be submitted. Do it where {program} is, or write "
            "it to a file with --dry-run."
        )
    sent = {"input": prepared.stdin, "timeout": _SUBMIT_TIMEOUT_S} if prepared.stdin else {}
    ended = subprocess.run(prepared.command, text=True, check=False, **sent)  # type: ignore[call-overload]
    return int(ended.returncode)


def prepare_launch(launcher: Launcher, words: Sequence[str], config_dir: Path | None) -> Launch:
    """Check the configuration and the settings, and write what starts the run.

    Raises:
        ConfigError: Listing all violations.
    """
    problems: list[str] = []
    overrides = [word for word in words if not word.lstrip("+").startswith("launch.")]
    typed = [word.lstrip("+") for word in words if word.lstrip("+").startswith("launch.")]
    settings = read_settings(SETTINGS[launcher], typed, problems)
    keys = {word: word.lstrip("+").partition("=")[0] for word in overrides}
    problems += [
        f"{word}: a launched run has {key}={OWN_KEYS[key]}. Leave it out."
        for word, key in keys.items()
        if key in OWN_KEYS
    ]
    own = [f"{key}={value}" for key, value in OWN_KEYS.items()]
    config: RunConfig | None = None
    try:
        config = compose_config([*overrides, *own] if not problems else overrides, config_dir=config_dir)
    except ConfigError as error:
        problems += error.violations
    if problems or settings is None or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    run_dir = Path(settings.shared_dir) / config.run_dir  # as it is, if it is absolute
    folder = config_dir.resolve() if config_dir is not None and launcher != "kuberay" else config_dir
    grace = [] if "stop_grace_s" in keys.values() else [f"stop_grace_s={GRACE_S - KILL_RESERVE_S}"]
    command = train_command([*overrides, f"run_dir={run_dir}", *own, *grace], folder)
    if isinstance(settings, SlurmSettings):
        script = slurm_script(config, command, settings, Path(sys.executable).parent)
        return Launch(script, ["sbatch"], script)
    if isinstance(settings, KubeRaySettings):
        manifest = kuberay_manifest(config, command, settings)
        return Launch(manifest, ["kubectl", "apply", "-f", "-"], manifest)
    assert isinstance(settings, RaySettings)
    return Launch(ray_commands(config, command, settings), job_submission(command, settings))


def read_settings(model: type[LaunchSettings], typed: Sequence[str], problems: list[str]) -> LaunchSettings | None:
    """Settings of a launcher; None after an invalid one, of which `problems` gets a sentence each."""
    values: dict[str, Any] = {}
    for word in typed:
        key, separator, text = word.removeprefix("launch.").partition("=")
        if not separator:
            problems.append(f"{word}: write launch.KEY=VALUE.")
            return None
        try:
            # Only what has brackets is YAML: 12:00:00 would become a number of seconds.
            values[key] = yaml.safe_load(text) if text.startswith("{") else text
        except yaml.YAMLError as error:
            problems.append(f"{word}: is no YAML: {' '.join(str(error).split())}")
            return None
    try:
        return model.model_validate(values)
    except ValidationError as error:
        keys = list(model.model_fields)
        for details in error.errors(include_url=False):
            key = ".".join(map(str, details["loc"]))
            if details["type"] == "extra_forbidden":
                hint = nearest_choice(key, keys)
                told = f"is no setting of this launcher.{hint} Settings: {', '.join(keys)}."
            elif details["type"] == "missing":
                told = f"is needed: {descriptions(model)[key]}"
            else:
                told = details["msg"].removeprefix("Value error, ") + "."
            problems.append(f"launch.{key}{'=' + str(values[key]) if key in values else ''}: {told}")
        return None


def run_wait(num_nodes: int, timeout_s: float, say: Callable[[str], None]) -> int:
    """Wait until the Ray cluster of RAY_ADDRESS, or of this machine, has `num_nodes` nodes; returns the exit code.

    Says at the start and each minute which nodes are there.

    Raises:
        PlacementError: If it has fewer at the time limit.
    """
    import ray

    from penstock.actors.cluster import connection_problem

    names, problem = list[str](), ""
    address = os.environ.get("RAY_ADDRESS", "auto")
    begun = time.monotonic()
    next_note = begun
    try:
        while True:
            try:
                if not ray.is_initialized() and not (problem := connection_problem(address)):
                    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
                if ray.is_initialized():
                    names = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
            except (ConnectionError, RuntimeError) as error:  # the head is not up yet
                problem = (str(error).strip().splitlines() or [problem])[0]
            if len(names) >= num_nodes:
                say(f"{len(names)} node{'s' if len(names) > 1 else ''}: {', '.join(names)}")
                return 0
            now = time.monotonic()
            if now >= begun + timeout_s:
                break
            if now >= next_note:
                here = f"{len(names)} of {num_nodes} nodes ({', '.join(names) or problem})"
                say(f"launch: {here} are in Ray at {address}, {now - begun:.0f} s so far; the limit is {timeout_s:g} s")
                next_note += NOTE_S
            time.sleep(_POLL_S)
    finally:
        ray.shutdown()
    found = ", ".join(names) or problem
    raise PlacementError(
        f"launch: {len(names)} of {num_nodes} nodes joined Ray at {address} within {timeout_s:g} s ({found}). The run "
        "would wait for devices that are not there. Look for the missing ones in this job's log, and check that the "
        "nodes reach each other's ports."
    )
