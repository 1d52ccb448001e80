"""Builds the sandbox of the configuration section `sandbox`."""

from __future__ import annotations

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Sandbox
from penstock.envs.sandbox.local import LocalSandbox, judge_isolation, try_isolation
from penstock.envs.sandbox.remote import RemoteSandbox


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox that the configuration names. It starts with the first program; the caller closes it."""
    return LocalSandbox(config) if config.remote is None else RemoteSandbox(config.remote, config.num_slots)


def check_sandbox(config: SandboxConfig) -> None:
    """Check before the run whether programs may run here.

    Raises:
        ConfigError: If the host allows no isolation and `allow_unisolated` is off.
    """
    if config.remote is None:
        judge_isolation(try_isolation(config), config)
