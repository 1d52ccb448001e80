"""The `penstock` command. Thin: it reads arguments, opens the door of the configuration and calls what does the work.

Heavy imports (Ray, torch, vLLM) live inside the commands, so that `penstock --help` is quick.
Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.dataflow.errors import PenstockError
from penstock.platform.cli_exit import EXIT_CONFIG, EXIT_SIGNAL, ConfigDir, DryRun, Overrides, exit_with, print_error
from penstock.platform.cli_groups import GROUPS

if TYPE_CHECKING:
    from penstock.platform.config.findings import Command
    from penstock.platform.config.schema import RunConfig

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement-learning post-training of language models on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for name, group in GROUPS.items():
    app.add_typer(group, name=name)


@app.command()
def train(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Train a policy by reinforcement learning."""
    _run("train", overrides, config_dir, _train, dry_run=dry_run)


@app.command()
def sft(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Warm-start a policy on worked answers."""
    _run("sft", overrides, config_dir, _sft, dry_run=dry_run)


@app.command()
def rm(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Train a reward model on pairs of answers (Bradley-Terry)."""
    _run("rm", overrides, config_dir, partial(_prefer, command="rm"), dry_run=dry_run)


@app.command()
def dpo(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Train a policy on pairs of answers (DPO, offline); the reference is the policy that it starts from."""
    _run("dpo", overrides, config_dir, partial(_prefer, command="dpo"), dry_run=dry_run)


@app.command("eval")
def evaluate(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Measure the greedy accuracy of a policy: penstock eval experiment=arithmetic model.path=DIR."""
    _run("eval", overrides, config_dir, _evaluate, dry_run=dry_run)


@app.command()
def sample(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Write scored answers of a policy, and pairs of better and worse ones: penstock sample experiment=arithmetic."""
    _run("sample", overrides, config_dir, _sample, dry_run=dry_run)


@app.command(no_args_is_help=True)
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
) -> None:
    """Train once for each combination of values, e.g. sweep experiment=arithmetic algorithm=grpo,rloo seeds=0:3.

    All runs are checked before the first one starts. Runs that have completed are skipped, so the same command
    continues an interrupted sweep. A run that fails is named at the end; the others go on.

    DIR/sweep.md, .csv, .json and .html hold final accuracy, gain, mean lag, status and run directory, and are written
    after every run.
    """

    def body() -> int:
        from rich.console import Console

        from penstock.platform.sweep import run_sweep

        return run_sweep(
            overrides or [],
            folder=folder,
            cell_timeout_s=cell_timeout_s,
            dry_run=dry_run,
            config_dir=config_dir,
            console=Console(soft_wrap=True),
        )

    exit_with(body)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/arithmetic.")]) -> None:
    """Write report.html of a run and print its path."""

    def write() -> int:
        from penstock.platform.observability.report import write_report

        if not run.is_dir():
            print_error(
                PenstockError(f"{run}: no such run directory. Runs are in runs/ unless run_dir says otherwise.")
            )
            return EXIT_CONFIG
        typer.echo(write_report(run))
        return 0

    exit_with(write)


@app.command()
def doctor() -> None:
    """Check this machine and its packages: one line each, what is wrong and what to do."""

    def check() -> int:
        from penstock.platform.doctor import run_doctor

        return run_doctor()

    exit_with(check)


@app.command()
def algorithms(
    *,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only one kind, e.g. loss or correction.")] = None,
) -> None:
    """List advantages, losses, corrections and the rest by name, with formula, paper and file."""

    def body() -> int:
        from rich.console import Console

        from penstock.platform.cli_algorithms import run_algorithms

        return run_algorithms(kind, Console())

    exit_with(body)


@app.command()
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
) -> None:
    """Run the controller in virtual time, over simulated devices, with faults. Exit code 1 on a violation."""

    def body() -> int:
        from penstock.platform.cli_simulate import run_simulate

        return run_simulate(overrides or [], seeds, as_json=as_json, shows_trace=trace, calibrate=calibrate)

    exit_with(body)


def main() -> None:
    """Console entry point."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # this process computes nothing; trainer ranks set their own
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what cannot be had is said once, by us, not at every retry
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # else Ray answers SIGTERM with a C++ stack trace
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # `reward.fn=my_module.my_reward` finds a file beside the user
    app()


def _run(
    command: Command,
    overrides: list[str] | None,
    config_dir: Path | None,
    start: Callable[[RunConfig], int],
    *,
    dry_run: bool,
) -> None:
    """Load the configuration and start, or print what would be started."""

    def body() -> int:
        if dry_run:  # before any import of huggingface_hub: a dry run asks no network
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        from rich.console import Console

        from penstock.platform.config.load import load_config
        from penstock.platform.dry_run import print_dry_run, print_warnings

        loaded = load_config(command, overrides or [], config_dir=config_dir, dry_run=dry_run)
        if dry_run:
            print_dry_run(loaded, command, Console())
            return 0
        if loaded.warm_start is not None:
            return _start(_sft, loaded.warm_start) or _again(loaded.config)
        print_warnings(loaded.warnings, Console(stderr=True))
        return _start(start, loaded.config)

    exit_with(body)


def _again(config: RunConfig) -> int:
    """Begin this very command anew, in this process but from nothing: Ray cannot be started twice.

    Raises:
        PenstockError: If the warm start has not made the policy.
    """
    from penstock.platform.config.checks_machine import awaits_warm_start

    if awaits_warm_start(config):
        raise PenstockError(f"warm_start: it ended well, but model.path={config.model.path} is still not there.")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own command line


def _start(start: Callable[[RunConfig], int], config: RunConfig) -> int:
    """Run to the end. Foreign errors become one line; their whole traceback is in the run directory."""
    from penstock.platform.lifecycle import Interrupted

    trace = Path(config.run_dir) / "error.txt"
    try:
        return start(config)
    except Interrupted as interrupted:
        return EXIT_SIGNAL + interrupted.signum
    except PenstockError:
        raise
    except Exception as error:
        if not trace.exists():
            raise
        last_line = (str(error).strip().splitlines() or [""])[-1]
        raise PenstockError(f"{type(error).__name__}: {last_line}\nThe whole traceback is in {trace}.") from error


def _train(config: RunConfig) -> int:
    from penstock.platform.launch import train as start

    return start(config)


def _sft(config: RunConfig) -> int:
    from penstock.platform.sft import run_sft

    return run_sft(config)


def _prefer(config: RunConfig, command: Command) -> int:
    from penstock.platform.preferences import run_preferences

    return run_preferences(config, "reward" if command == "rm" else "policy")


def _evaluate(config: RunConfig) -> int:
    from penstock.platform.serving import run_eval

    return run_eval(config)


def _sample(config: RunConfig) -> int:
    from penstock.platform.sample import run_sample

    return run_sample(config)


if __name__ == "__main__":
    main()
