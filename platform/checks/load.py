"""Loading of a configuration: compose, validate, check it, then check this machine and the user's plugins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.answer_parsers import check_answer_parsers
from penstock.platform.checks.cluster import check_pools
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.imports import check_imports
from penstock.platform.checks.machine import check_gpu_memory, check_machine
from penstock.platform.checks.model_files import awaits_warm_start, check_contexts
from penstock.platform.checks.run_dir import is_unfinished_warm_start
from penstock.platform.checks.tasks import check_plugins
from penstock.platform.checks.trackers import check_trackers
from penstock.platform.config.compose import Composition, compose_all
from penstock.platform.config.findings import Command, Finding
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import POLICY_FOLDER


@dataclass(slots=True)
class LoadedConfig:
    """A configuration that passed all checks."""

    config: RunConfig
    warnings: list[str]
    """Warnings to print before the run, one sentence each; first the defaults that did not fit, and the values in their
    place."""
    notes: list[str]
    """What the checks have found in order, for a dry run."""
    warm_start: RunConfig | None = None
    """Configuration of the `penstock sft` that creates `model.path` first; None if none is needed."""


def load_config(
    command: Command, overrides: list[str], *, config_dir: Path | None = None, dry_run: bool = False
) -> LoadedConfig:
    """Compose, validate and check a configuration without starting anything.

    Args:
        command: The command that uses the configuration.
        overrides: Hydra overrides.
        config_dir: Folder with the user's own YAML, in the same groups.
        dry_run: Whether to report missing resources of this machine as warnings.

    Raises:
        ConfigError: Listing all violations.
    """
    composition = compose_all(overrides, config_dir)
    config = composition.config
    if config is None:
        raise ConfigError(composition.problems)
    if harmful := composition.relevant(check_imports(config)):  # all further checks import the same modules
        raise ConfigError([*composition.problems, *(finding.message for finding in harmful)])
    findings = composition.settle(partial(check_all, command=command))
    config = composition.config
    assert config is not None, "settling replaces it by another one"
    # A model that the user names must be here, also for a dry run; that of a preset may still be made or downloaded.
    named = tuple(f"{key}=" for key in composition.typed if key.endswith("path") and not key.startswith("env."))
    problems = composition.problems + [
        finding.message
        for finding in findings
        if finding.refuses(dry_run=dry_run) or (finding.severity == "absent" and finding.message.startswith(named))
    ]
    loaded = LoadedConfig(
        config,
        [
            *composition.remarks,
            *composition.derived.values(),
            *(finding.message for finding in findings if finding.severity != "note"),
        ],
        [finding.message for finding in findings if finding.severity == "note"],
    )
    if command == "train" and awaits_warm_start(config):
        try:
            loaded.warm_start = load_warm_start(config, config_dir, dry_run=dry_run)
        except ConfigError as problem:
            problems += [f"warm_start: {violation}" for violation in problem.violations]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return loaded


def settled(
    config: RunConfig, command: Command, *, is_resumed: bool = False
) -> tuple[RunConfig, list[str], list[Finding]]:
    """Run all checks of a saved configuration.

    Returns:
        The configuration with the defaults that fit it, a sentence for each of those, and the findings.
    """
    composition = Composition(config, typed=list(config.typed), raw=config.model_dump(mode="json"))
    findings = composition.settle(partial(check_all, command=command, is_resumed=is_resumed))
    assert composition.config is not None, "settling replaces it by another one"
    return composition.config, list(composition.derived.values()), findings


def check_all(config: RunConfig, command: Command, *, is_resumed: bool = False) -> Iterator[Finding]:
    """Run all checks: first what only reads the configuration and the model, last what calls the user's code.

    Args:
        config: The configuration.
        command: The command that uses it.
        is_resumed: Whether the run continues in its own directory.
    """
    has_pools = not list(check_pools(config))
    if has_pools:
        yield from check_contexts(config, command)
        if config.cluster.address == "local":
            yield from check_gpu_memory(config, command)
    yield from check_config(config, command)
    yield from check_answer_parsers(config, command)
    if has_pools:  # these checks place roles on pools
        yield from check_machine(config, command, is_resumed=is_resumed)
    if command not in ("eval", "sample"):  # which have none
        yield from check_trackers(config)
    yield from check_plugins(config, command)


def compose_config(overrides: list[str], *, config_dir: Path | None = None, command: Command = "train") -> RunConfig:
    """Compose and validate a configuration without inspecting the machine, unlike `load_config`.

    Args:
        overrides: Hydra overrides, e.g. `["experiment=arithmetic", "dataflow.max_staleness=0"]`.
        config_dir: Folder with the user's own YAML, in the same groups.
        command: The command that uses the configuration.

    Raises:
        ConfigError: Listing all violations.
    """
    composition = compose_all(overrides, config_dir)
    findings = composition.settle(partial(check_config, command=command)) if composition.config else []
    problems = composition.problems + [finding.message for finding in findings if finding.severity == "error"]
    if problems or composition.config is None:
        raise ConfigError(problems)
    return composition.config


def load_warm_start(config: RunConfig, config_dir: Path | None, *, dry_run: bool) -> RunConfig:
    """Load the configuration of the `penstock sft` that creates `model.path`, with the seed of the run.

    Raises:
        ConfigError: If it is invalid, or would write its policy elsewhere.
    """
    path = Path(config.model.path or "")
    if path.name != POLICY_FOLDER:
        raise ConfigError(
            [
                f"model.path={path} does not end in /{POLICY_FOLDER}, and `penstock sft` writes "
                f"<run_dir>/{POLICY_FOLDER}: it would not be found there. Name it so, or set warm_start=null."
            ]
        )
    overwrites = config.overwrite or is_unfinished_warm_start(path.parent)
    own = [f"run_dir={path.parent}", f"seed={config.seed}", f"overwrite={str(overwrites).lower()}"]
    return load_config("sft", [*(config.warm_start or ()), *own], config_dir=config_dir, dry_run=dry_run).config
