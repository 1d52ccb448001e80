"""The whole door: compose, validate, check the configuration, then this machine and what the user plugged in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.dataflow.errors import ConfigError
from penstock.platform.config.checks import check_config
from penstock.platform.config.checks_cluster import check_pools
from penstock.platform.config.checks_machine import check_machine
from penstock.platform.config.checks_tasks import check_plugins
from penstock.platform.config.compose import compose_all
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration that may run.

    Attributes:
        warnings: Sentences a person should read first.
    """

    config: RunConfig
    warnings: list[str]


def load_config(
    command: Command, overrides: list[str], *, config_dir: Path | None = None, dry_run: bool = False
) -> LoadedConfig:
    """Compose, validate and check everything. Starts nothing.

    Args:
        command: What the configuration is for.
        overrides: Hydra overrides.
        config_dir: A folder with the user's own YAML, in the same groups.
        dry_run: What this machine lacks becomes a warning.

    Raises:
        ConfigError: If anything is wrong, with everything that is.
    """
    composition = compose_all(overrides, config_dir)
    config = composition.config
    if config is None:
        raise ConfigError(composition.problems)
    findings = check_config(config, command)
    if not list(check_pools(config)):  # roles can be placed
        findings += check_machine(config, command)
    findings = composition.relevant([*findings, *check_plugins(config, command)])
    problems = composition.problems + [finding.message for finding in findings if finding.refuses(dry_run=dry_run)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return LoadedConfig(config, [finding.message for finding in findings])
