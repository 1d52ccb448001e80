"""The commands of `penstock` that come in groups: weights, sandbox, env. Thin, as cli.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.platform.cli_exit import ConfigDir, Overrides, exit_with

if TYPE_CHECKING:
    from rich.console import Console

weights = typer.Typer(help="How weights travel from the trainer to the engines.", no_args_is_help=True)
sandbox = typer.Typer(help="Where programs that nobody trusts are run.", no_args_is_help=True)
environments = typer.Typer(help="Look at an environment, and play it, without a model.", no_args_is_help=True)
GROUPS = {"weights": weights, "sandbox": sandbox, "env": environments}

Isolation = Annotated[
    str | None,
    typer.Option(
        help="As env.episode.isolation and reward.isolation: process, strict, or e.g. '{network: true}'.",
        show_default=False,
    ),
]
Factory = Annotated[str, typer.Argument(metavar="ENV", help="A name of `penstock env list`, or module:name.")]
EnvArgs = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of it.", show_default=False)
]


@weights.command("plan")
def weights_plan(
    overrides: Overrides = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Print bytes per link, lower bound, egress and buckets of one publish; nothing is started."""

    def body() -> int:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        from penstock.platform.cli_weights import run_weights_plan
        from penstock.platform.config.load import load_config

        loaded = load_config("train", overrides or [], config_dir=config_dir, dry_run=True)
        return run_weights_plan(loaded.config, as_json=as_json)

    exit_with(body)


@sandbox.command("check")
def sandbox_check(
    *,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Without: what a host gives that allows no isolation.")
    ] = True,
) -> None:
    """Run hostile programs on this machine: which isolation was found, and what it contains. Exit code 1 if not all."""

    def body() -> int:
        from penstock.platform.cli_sandbox import run_sandbox_check

        return run_sandbox_check(isolate=isolate)

    exit_with(body)


@environments.command("list")
def env_list() -> None:
    """List the environments that are built in or installed."""
    from penstock.platform.cli_env import run_env_list

    exit_with(lambda: run_env_list(_console()))


@environments.command("show")
def env_show(factory: Factory, args: EnvArgs = None) -> None:
    """Print what an environment takes, and its first tasks."""
    from penstock.platform.cli_env import run_env_show

    exit_with(lambda: run_env_show(factory, args or [], _console()))


@environments.command("check")
def env_check(
    factory: Factory,
    args: EnvArgs = None,
    *,
    max_turns: Annotated[int, typer.Option(help="As env.episode.max_turns.")] = 12,
    timeout_s: Annotated[float, typer.Option(help="As env.episode.timeout_s, seconds.")] = 30.0,
    reward: Annotated[str | None, typer.Option(help="Scores answers of single-turn tasks: as reward.fn.")] = None,
    isolation: Isolation = None,
) -> None:
    """Play an environment with a scripted agent: types, determinism, speed, rewards. Exit code 1 if a check fails."""
    from penstock.platform.cli_env import run_env_check

    exit_with(lambda: run_env_check(factory, args or [], max_turns, timeout_s, reward, isolation, _console()))


@environments.command("play")
def env_play(factory: Factory, args: EnvArgs = None, *, isolation: Isolation = None) -> None:
    """Play one episode by hand; an empty line ends it."""
    from penstock.platform.cli_env import run_env_play

    exit_with(lambda: run_env_play(factory, args or [], input, _console(), isolation))


@sandbox.command("serve")
def sandbox_serve(
    overrides: Overrides = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port to listen on.", min=1, max=65535)] = 8080,
    token_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients must send; none asks for none.")
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run programs for reward workers on other machines (sandbox=remote there), within the limits of `sandbox`."""

    def body() -> int:
        from penstock.platform.cli_sandbox import run_sandbox_service
        from penstock.platform.config.load import load_config

        config = load_config("train", overrides or [], config_dir=config_dir, dry_run=True).config.sandbox
        return run_sandbox_service(config, host, port, token_variable)

    exit_with(body)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)
