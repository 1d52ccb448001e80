"""The `penstock` command. Thin: it reads arguments, opens the door of the configuration and calls what does the work.

Heavy imports (Ray, torch, vLLM) live inside the commands, so that `penstock --help` is quick.
Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.dataflow.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.platform.config.findings import Command
    from penstock.platform.config.schema import RunConfig

EXIT_FAILED, EXIT_CONFIG, EXIT_SIGNAL = 1, 2, 128

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement-learning post-training of language models on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

weights = typer.Typer(help="How weights travel from the trainer to the engines.", no_args_is_help=True)
app.add_typer(weights, name="weights")
sweep = typer.Typer(help="Many runs that differ in one thing.", no_args_is_help=True)
app.add_typer(sweep, name="sweep")
sandbox = typer.Typer(help="Where programs that nobody trusts are run.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")

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


@app.command()
def train(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Train a policy by reinforcement learning."""
    _run("train", overrides, config_dir, _train, dry_run=dry_run)


@app.command()
def sft(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Warm-start a policy on worked answers."""
    _run("sft", overrides, config_dir, _sft, dry_run=dry_run)


@app.command("eval")
def evaluate(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> None:
    """Measure the greedy accuracy of a policy: penstock eval experiment=arithmetic model.path=DIR."""
    _run("eval", overrides, config_dir, _evaluate, dry_run=dry_run)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/arithmetic.")]) -> None:
    """Write report.html of a run and print its path."""

    def write() -> int:
        from penstock.platform.observability.report import write_report

        if not run.is_dir():
            _print_error(
                PenstockError(f"{run}: no such run directory. Runs are in runs/ unless run_dir says otherwise.")
            )
            return EXIT_CONFIG
        typer.echo(write_report(run))
        return 0

    _exit_with(write)


@app.command()
def doctor() -> None:
    """Check this machine and its packages: one line each, what is wrong and what to do."""

    def check() -> int:
        from penstock.platform.doctor import run_doctor

        return run_doctor()

    _exit_with(check)


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

    _exit_with(body)


@sweep.command("staleness")
def sweep_staleness(
    overrides: Overrides = None,
    *,
    algorithms: Annotated[str, typer.Option(metavar="A,B,…", help="Presets of conf/algorithm.")] = "grpo",
    staleness: Annotated[str, typer.Option(metavar="0,4,…", help="Bounds: dataflow.max_staleness.")] = "0,4,16",
    seeds: Annotated[str, typer.Option(metavar="FIRST:END", help="Seeds of each cell.")] = "0:1",
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Runs and results.")] = Path("runs/sweep-staleness"),
    cell_timeout_s: Annotated[float, typer.Option(metavar="S", help="Longest run, seconds.")] = 7200.0,
    uncorrected: Annotated[bool, typer.Option(help="Also train as if nothing were stale.")] = True,
) -> None:
    """Final accuracy over algorithm x staleness bound: one table, one plot; goes on where it was interrupted."""

    def body() -> int:
        from rich.console import Console

        from penstock.platform.cli_sweep import run_staleness_sweep

        return run_staleness_sweep(
            overrides or [],
            algorithms=algorithms,
            staleness=staleness,
            seeds=seeds,
            folder=folder,
            cell_timeout_s=cell_timeout_s,
            with_uncorrected=uncorrected,
            console=Console(),
        )

    _exit_with(body)


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

    _exit_with(body)


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

    _exit_with(body)


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

    _exit_with(body)


@app.command()
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="e.g. profile=longtail pools=24x16+8 eta=2 faults=light; or compare=NAME",
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

    _exit_with(body)


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
        print_warnings(loaded.warnings, Console(stderr=True))
        return _start(start, loaded.config)

    _exit_with(body)


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


def _exit_with(body: Callable[[], int]) -> None:
    """Run a command's body; turn what it returns or raises into an exit code and at most one readable error."""
    try:
        code = body()
    except ConfigError as error:
        _print_error(error)
        code = EXIT_CONFIG
    except PenstockError as error:
        _print_error(error)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_SIGNAL + 2
    raise typer.Exit(code)


def _print_error(error: PenstockError) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print("error:", str(error), style="red", markup=False)


def _train(config: RunConfig) -> int:
    from penstock.platform.launch import train as start

    return start(config)


def _sft(config: RunConfig) -> int:
    from penstock.platform.sft import run_sft

    return run_sft(config)


def _evaluate(config: RunConfig) -> int:
    from penstock.platform.evaluate import run_eval

    return run_eval(config)


if __name__ == "__main__":
    main()
