"""`penstock sandbox check` tests the sandbox of this machine; `penstock sandbox serve` offers it to other machines."""

from __future__ import annotations

import asyncio
import logging
import os

from rich.console import Console
from rich.table import Table

from penstock.dataflow.errors import ConfigError
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.hostile import try_all
from penstock.envs.sandbox.service import serve

_WORDS = {True: "[green]contained[/green]", False: "[bold red]NOT CONTAINED[/bold red]", None: "not run"}


def run_sandbox_check(*, isolate: bool, console: Console | None = None) -> int:
    """Print the isolation and one line per hostile program; returns 1 if one was not contained, else 0.

    Args:
        isolate: False shows the results on a host without isolation.
        console: Where to print; None is standard output.
    """
    console = console or Console(highlight=False)
    logger = logging.getLogger("penstock.envs.sandbox")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the table shows it
    try:
        isolation, verdicts = asyncio.run(try_all(SandboxConfig(allow_unisolated=True), isolate=isolate))
    finally:
        logger.setLevel(level)
    table = Table("program", "verdict", "how it ended")
    for case, verdict in verdicts.items():
        table.add_row(case.name, _WORDS[verdict.is_contained], verdict.found)
    console.print(f"isolation: {isolation}")
    console.print(table)
    bad = [case.name for case, verdict in verdicts.items() if verdict.is_contained is False]
    if bad:
        console.print(
            f"{len(bad)} of {len(verdicts)} are not contained: do not run untrusted code on this machine. Allow user "
            "namespaces, or use sandbox=remote (docs/guides/sandbox.md)."
        )
    else:
        console.print(f"all {sum(verdict.is_contained is True for verdict in verdicts.values())} contained")
    return int(bool(bad))


def run_sandbox_service(config: SandboxConfig, host: str, port: int, token_variable: str | None) -> int:
    """Serve sandbox jobs until SIGINT or SIGTERM.

    Args:
        config: Isolation, slots, and the largest limits that a job may request.
        host: Address to listen on.
        port: TCP port to listen on.
        token_variable: Environment variable that holds the token; None requires no token.

    Raises:
        ConfigError: If the configuration is for a client, the token is not set, or the host allows no isolation.
    """
    if config.remote is not None:
        raise ConfigError(
            [f"sandbox.remote.url={config.remote.url}: the service must run programs itself. Use sandbox=local."]
        )
    token = None if token_variable is None else os.environ.get(token_variable, "")
    if token == "":
        raise ConfigError(
            [f"--token-variable {token_variable}: this environment variable is not set or empty. Set it."]
        )
    serve(config, host, port, token)
    return 0
