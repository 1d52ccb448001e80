"""The `penstock` command. Thin: it reads arguments, opens the door of the configuration and calls what does the work.

Heavy imports (Ray, torch, vLLM) live inside the commands, so that `penstock --help` is quick.
Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from penstock.dataflow.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.platform.config.findings import Command
    from penstock.platform.config.schema import RunConfig

EXIT_FAILED, EXIT_CONFIG, EXIT_SIGNAL = 1, 2, 128
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="experiment=NAME [KEY=VALUE]...",
        help="Hydra overrides: GROUP=CHOICE or KEY=VALUE, e.g. rollout/engine=torch dataflow.max_staleness=0",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print configuration and placement; start nothing.")]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="Your own YAML, in the same groups as conf/.")
]
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

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement-learning post-training of language models on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
weights = typer.Typer(help="How weights travel from the trainer to the engines.", no_args_is_help=True)
sandbox = typer.Typer(help="Where untrusted programs are run.", no_args_is_help=True)
environments = typer.Typer(help="Look at an environment, and play it, without a model.", no_args_is_help=True)
app.add_typer(weights, name="weights")
app.add_typer(sandbox, name="sandbox")
app.add_typer(environments, name="env")

Arguments = ParamSpec("Arguments")


def exits(body: Callable[Arguments, int]) -> Callable[Arguments, None]:
    """Turn what a command returns or raises into an exit code and at most one readable error."""

    @wraps(body)
    def command(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            code = body(*args, **kwargs)
        except PenstockError as error:
            code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
            print_error(error)
        except KeyboardInterrupt:
            code = EXIT_SIGNAL + 2
        raise typer.Exit(code)

    return command


def print_error(error: PenstockError) -> None:
    plain_console(stderr=True).print("error:", str(error), style="red", markup=False)


def plain_console(*, stderr: bool = False) -> Console:
    """A terminal that colours and wraps nothing by itself."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


RUNS: dict[Command, tuple[str, str]] = {
    "train": ("penstock.platform.run.launch:train", "Train a policy by reinforcement learning."),
    "sft": ("penstock.platform.run.offline_training:run_sft", "Warm-start a policy on worked answers."),
    "rm": (
        "penstock.platform.run.offline_training:run_rm",
        "Train a reward model on pairs of answers (Bradley-Terry).",
    ),
    "dpo": (
        "penstock.platform.run.offline_training:run_dpo",
        "Train a policy on pairs of answers (DPO, offline); the reference is the policy that it starts from.",
    ),
    "eval": (
        "penstock.platform.run.serving:run_eval",
        "Measure the greedy accuracy of a policy: penstock eval experiment=arithmetic model.path=DIR.",
    ),
    "sample": (
        "penstock.platform.run.sample:run_sample",
        "Write scored answers of a policy, and pairs of better and worse ones: penstock sample experiment=arithmetic.",
    ),
}
"""Commands that run a checked configuration to its end: module and function that do, and the help."""


def add_run(command: Command, summary: str) -> None:
    """Add a command that loads the configuration and starts, or prints what would be started."""

    @app.command(command, help=summary)
    @exits
    def run(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> int:
        if dry_run:  # before any import of huggingface_hub: a dry run asks no network
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        from rich.console import Console

        from penstock.platform.checks.load import load_config
        from penstock.platform.cli.dry_run import print_dry_run, print_warnings

        loaded = load_config(command, overrides or [], config_dir=config_dir, dry_run=dry_run)
        if dry_run:
            print_dry_run(loaded, command, Console())
            return 0
        if loaded.warm_start is not None:
            return start("sft", loaded.warm_start) or begin_again(loaded.config)
        print_warnings(loaded.warnings, Console(stderr=True))
        return start(command, loaded.config)


def start(command: Command, config: RunConfig) -> int:
    """Run to the end. Foreign errors become one line; their whole traceback is in the run directory."""
    from penstock.platform.run.lifecycle import Interrupted

    module, _, function = RUNS[command][0].partition(":")
    trace = Path(config.run_dir) / "error.txt"
    try:
        code: int = getattr(import_module(module), function)(config)
        return code
    except Interrupted as interrupted:
        return EXIT_SIGNAL + interrupted.signum
    except PenstockError:
        raise
    except Exception as error:
        if not trace.exists():
            raise
        last_line = (str(error).strip().splitlines() or [""])[-1]
        raise PenstockError(f"{type(error).__name__}: {last_line}\nThe whole traceback is in {trace}.") from error


def begin_again(config: RunConfig) -> int:
    """Begin this very command again, in this process but from nothing: Ray cannot be started twice.

    Raises:
        PenstockError: If the warm start has not made the policy.
    """
    from penstock.platform.checks.machine import awaits_warm_start

    if awaits_warm_start(config):
        raise PenstockError(f"warm_start: it ended well, but model.path={config.model.path} is still not there.")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own command line


for name, (_, summary) in RUNS.items():
    add_run(name, summary)


@app.command(no_args_is_help=True)
@exits
def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="experiment=NAME KEY=A,B [seeds=FIRST:END] [KEY=VALUE]...",
            help="KEY=A,B or GROUP=A,B: one run for each combination of the values. Other overrides hold for all runs.",
            show_default=False,
        ),
    ] = None,
    *,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Runs, logs and results.")] = Path("runs/sweep"),
    cell_timeout_s: Annotated[float, typer.Option(metavar="S", help="Longest run, seconds.")] = 7200.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all runs and list them; start none.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Train once for each combination of values, e.g. sweep experiment=arithmetic algorithm=grpo,rloo seeds=0:3.

    All runs are checked before the first one starts. Runs that have completed are skipped, so the same command
    continues an interrupted sweep. A run that fails is named at the end; the others go on.

    DIR/sweep.md, .csv, .json and .html hold final accuracy, gain, mean lag, status and run directory, and are written
    after every run.
    """
    from rich.console import Console

    from penstock.platform.cli.sweep import run_sweep

    return run_sweep(
        overrides or [],
        folder=folder,
        cell_timeout_s=cell_timeout_s,
        dry_run=dry_run,
        config_dir=config_dir,
        console=Console(soft_wrap=True),
    )


@app.command()
@exits
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/arithmetic.")]) -> int:
    """Write report.html of a run and print its path."""
    from penstock.platform.metrics.report import write_report

    if not run.is_dir():
        print_error(PenstockError(f"{run}: no such run directory. Runs are in runs/ unless run_dir says otherwise."))
        return EXIT_CONFIG
    typer.echo(write_report(run))
    return 0


@app.command()
@exits
def doctor() -> int:
    """Check this machine and its packages: one line each, what is wrong and what to do."""
    from penstock.platform.cli.doctor import run_doctor

    return run_doctor()


@app.command()
@exits
def algorithms(
    *,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only one kind, e.g. loss or correction.")] = None,
) -> int:
    """List advantages, losses, corrections and the rest by name, with formula, paper and file."""
    from rich.console import Console

    from penstock.platform.cli.algorithms import run_algorithms

    return run_algorithms(kind, Console())


@app.command()
@exits
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="e.g. profile=longtail pools=24x16+8 eta=2 faults=light",
            show_default=False,
        ),
    ] = None,
    *,
    seeds: Annotated[str, typer.Option(metavar="FIRST:END", help="Seeds to run.")] = "0:1",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print the last events of every seed.")] = False,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Fit the costs to a run; print predicted and measured step time.")
    ] = None,
) -> int:
    """Run the controller in virtual time, over simulated devices, with faults. Exit code 1 on a violation."""
    from penstock.platform.cli.simulate import run_simulate

    return run_simulate(overrides or [], seeds, as_json=as_json, shows_trace=trace, calibrate=calibrate)


@weights.command("plan")
@exits
def weights_plan(
    overrides: Overrides = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Print bytes per link, lower bound, egress and buckets of one publish; nothing is started."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from penstock.platform.checks.load import load_config
    from penstock.platform.cli.weights import run_weights_plan

    loaded = load_config("train", overrides or [], config_dir=config_dir, dry_run=True)
    return run_weights_plan(loaded.config, as_json=as_json)


@sandbox.command("check")
@exits
def sandbox_check(
    *,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Without: what a host gives that allows no isolation.")
    ] = True,
) -> int:
    """Run hostile programs on this machine: which isolation was found, and what it contains. Exit code 1 if not all."""
    from penstock.platform.cli.sandbox import run_sandbox_check

    return run_sandbox_check(isolate=isolate)


@sandbox.command("serve")
@exits
def sandbox_serve(
    overrides: Overrides = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port to listen on.", min=1, max=65535)] = 8080,
    token_variable: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients must send; none asks for none.")
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Run programs for reward workers on other machines (sandbox=remote there), within the limits of `sandbox`."""
    from penstock.platform.checks.load import load_config
    from penstock.platform.cli.sandbox import run_sandbox_service

    config = load_config("train", overrides or [], config_dir=config_dir, dry_run=True).config.sandbox
    return run_sandbox_service(config, host, port, token_variable)


@environments.command("list")
@exits
def env_list() -> int:
    """List the environments that are built in or installed."""
    from penstock.platform.cli.env import run_env_list

    return run_env_list(plain_console())


@environments.command("show")
@exits
def env_show(factory: Factory, args: EnvArgs = None) -> int:
    """Print what an environment takes, and its first tasks."""
    from penstock.platform.cli.env import run_env_show

    return run_env_show(factory, args or [], plain_console())


@environments.command("check")
@exits
def env_check(
    factory: Factory,
    args: EnvArgs = None,
    *,
    max_turns: Annotated[int, typer.Option(help="As env.episode.max_turns.")] = 12,
    timeout_s: Annotated[float, typer.Option(help="As env.episode.timeout_s, seconds.")] = 30.0,
    reward: Annotated[str | None, typer.Option(help="Scores answers of single-turn tasks: as reward.fn.")] = None,
    isolation: Isolation = None,
) -> int:
    """Play an environment with a scripted agent: types, determinism, speed, rewards. Exit code 1 if a check fails."""
    from penstock.platform.cli.env import run_env_check

    return run_env_check(factory, args or [], max_turns, timeout_s, reward, isolation, plain_console())


@environments.command("play")
@exits
def env_play(factory: Factory, args: EnvArgs = None, *, isolation: Isolation = None) -> int:
    """Play one episode by hand; an empty line ends it."""
    from penstock.platform.cli.env import run_env_play

    return run_env_play(factory, args or [], input, plain_console(), isolation)


def main() -> None:
    """Console entry point."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # this process computes nothing; trainer ranks set their own
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what cannot be had is said once, by us, not at every retry
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # else Ray answers SIGTERM with a C++ stack trace
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # `reward.fn=my_module.my_reward` finds a file beside the user
    app()


if __name__ == "__main__":
    main()
