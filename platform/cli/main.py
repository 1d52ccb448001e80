"""The `penstock` command: parses arguments, loads the configuration and calls the module that implements the command.

Heavy imports (Ray, torch, vLLM) are inside the commands, so that `penstock --help` is fast.
Exit codes: 0 success, 1 the run failed, 2 the configuration is invalid, 128 + its number after a signal.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec

import typer

from penstock.dataflow.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.platform.cli.launch import Launcher
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print configuration and placement without starting the run.")]
ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", metavar="DIR", help="Folder with your own YAML, in the same groups as conf/."),
]
Isolation = Annotated[
    str | None,
    typer.Option(
        help="As env.episode.isolation and reward.isolation: process, strict, or grants, e.g. '{network: true}'.",
        show_default=False,
    ),
]
Python = Annotated[str | None, typer.Option(help="Interpreter of the environment, as env.python.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/arithmetic.")]
Factory = Annotated[str, typer.Argument(metavar="ENV", help="A name from `penstock env list`, or module:name.")]
EnvArgs = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the environment.", show_default=False)
]

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement-learning post-training of language models on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
sandbox = typer.Typer(help="Check or serve the sandbox in which untrusted programs run.", no_args_is_help=True)
environments = typer.Typer(help="Inspect, check and play environments without a model.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")
app.add_typer(environments, name="env")
launch = typer.Typer(help="Start a training run on several nodes, from the same configuration.", no_args_is_help=True)
app.add_typer(launch, name="launch")

Arguments = ParamSpec("Arguments")


def exits(body: Callable[Arguments, int]) -> Callable[Arguments, None]:
    """Convert the return value or exception of a command into an exit code and at most one readable error."""

    @wraps(body)
    def command(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            code = body(*args, **kwargs)
        except PenstockError as error:
            code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
            print_error(error)
        except KeyboardInterrupt:
            code = EXIT_SIGNAL + signal.SIGINT
        raise typer.Exit(code)

    return command


def print_error(error: PenstockError) -> None:
    plain_console(stderr=True).print("error:", str(error), style="red", markup=False)


def plain_console(*, stderr: bool = False) -> Console:
    """Create a console that prints texts as they are: brackets of paths are no markup, and lines are not wrapped."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)


RUNS: dict[Command, tuple[str, str]] = {
    "train": ("penstock.platform.run.resume:train", "Train a policy by reinforcement learning."),
    "sft": (
        "penstock.platform.run.offline_training:run_sft",
        "Train a policy on gold answers (supervised warm start).",
    ),
    "rm": (
        "penstock.platform.run.offline_training:run_rm",
        "Train a reward model on preference pairs (Bradley-Terry).",
    ),
    "dpo": (
        "penstock.platform.run.offline_training:run_dpo",
        "Train a policy on preference pairs (offline DPO). The reference is the initial policy.",
    ),
    "sample": (
        "penstock.platform.run.sample:run_sample",
        "Sample and score answers, and write them and their preference pairs: penstock sample experiment=arithmetic.",
    ),
}
"""Commands that run a checked configuration to its end: import path of the implementation, and the help text."""


def add_run(command: Command, summary: str) -> None:
    """Add a command that loads the configuration, and then starts the run or prints what it would start."""

    @app.command(command, help=summary)
    @exits
    def run(overrides: Overrides = None, *, dry_run: DryRun = False, config_dir: ConfigDir = None) -> int:
        # A dry run uses no network. Set before huggingface_hub is imported, which reads the variable once.
        if dry_run:
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        with startable_again():
            with checking():
                from rich.console import Console

                from penstock.platform.checks.load import load_config
                from penstock.platform.cli.dry_run import print_dry_run, print_warnings

                loaded = load_config(command, overrides or [], config_dir=config_dir, dry_run=dry_run)
            if dry_run:
                print_dry_run(loaded, command, Console())
                return 0
            if loaded.warm_start is not None:
                if loaded.warm_start.overwrite and not loaded.config.overwrite:
                    folder = loaded.warm_start.run_dir
                    plain_console(stderr=True).print(f"the warm start in {folder} was ended early: it is made again")
                return start("sft", loaded.warm_start) or restart_command(loaded.config)
            print_warnings(loaded.warnings, Console(stderr=True))
            return start(command, loaded.config)


@contextmanager
def unwinding() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise `SystemExit`, so that what was started is ended, as with Ctrl-C."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_SIGNAL + signum)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def startable_again() -> Iterator[None]:
    """Within it, a signal that comes before anything is started ends the command with the line that starts it again."""
    try:
        with unwinding():
            yield
    except (KeyboardInterrupt, SystemExit):
        print_next("ended before anything was started; the same command starts it again:", own_command())
        raise


@contextmanager
def checking() -> Iterator[None]:
    """Within it, the console says what is waited for."""
    from penstock.platform.metrics.progress import waiting

    with waiting("checking the configuration, the tasks and the machine"):
        yield


def own_command(*more: str) -> str:
    """The command that was typed, with more arguments."""
    return shlex.join(["penstock", *sys.argv[1:], *more])


def start(command: Command, config: RunConfig) -> int:
    """Run to the end."""
    module, _, function = RUNS[command][0].partition(":")
    code = with_trace(Path(config.run_dir) / "error.txt", lambda: getattr(import_module(module), function)(config))
    if code > EXIT_SIGNAL and command != "train":  # a run of `train` says itself what goes on with it
        has_files = Path(config.run_dir).exists()
        told = f"ended by {signal.Signals(code - EXIT_SIGNAL).name}; this command starts it again:"
        print_next(told, own_command(*(["overwrite=true"] if has_files and not config.overwrite else [])))
    return code


def print_next(told: str, command: str) -> None:
    """Print how a command ended, and what goes on with it. The terminal may be gone."""
    with suppress(OSError):
        console = plain_console(stderr=True)
        console.print(told)
        console.print(command, markup=False)


def with_trace(trace: Path, run: Callable[[], int]) -> int:
    """Report a foreign error of a run in one line; its traceback is in `trace`, in the run directory."""
    from penstock.platform.run.lifecycle import Interrupted, write_failure

    try:
        return run()
    except Interrupted as interrupted:
        return interrupted.exit_code
    except PenstockError:
        raise
    except Exception as error:
        if trace.parent.is_dir() and not trace.exists():  # it was raised after the run; typer would hide a broken pipe
            write_failure(trace.parent, error)
        if not trace.exists():
            raise
        last_line = (str(error).strip().splitlines() or [""])[-1]
        raise PenstockError(f"{type(error).__name__}: {last_line}\nThe full traceback is in {trace}.") from error


def restart_command(config: RunConfig) -> int:
    """Run this command again after its warm start, in a fresh interpreter, because Ray cannot be started twice.

    Raises:
        PenstockError: If the warm start has not written the policy.
    """
    from penstock.platform.checks.model_files import awaits_warm_start

    if awaits_warm_start(config):
        raise PenstockError(f"warm_start: it succeeded, but model.path={config.model.path} still does not exist.")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own command line


for name, (_, summary) in RUNS.items():
    add_run(name, summary)


@app.command("eval", no_args_is_help=True)
@exits
def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[POLICY [POLICY]] [experiment=NAME] [KEY=VALUE]...",
            help="POLICY: a run directory, e.g. runs/arithmetic, or a checkpoint in it, a Hugging Face folder, or a "
            "name on the Hub; default model.path. Two are compared. Then Hydra overrides; a run has its own "
            "configuration.",
            show_default=False,
        ),
    ] = None,
    *,
    step: Annotated[int | None, typer.Option(help="Step of the policy of a run. Default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="That of the best evaluation (evaluation.keep_best).")] = False,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder of the results. Default: in runs/evaluations.")
    ] = None,
    dry_run: DryRun = False,
    config_dir: ConfigDir = None,
) -> int:
    """Measure a policy on held-out tasks: penstock eval runs/arithmetic, or eval experiment=arithmetic model.path=DIR.

    The folder of the results has evaluation.json and answers.jsonl; `penstock compare` compares two of them.
    """
    if dry_run:  # as in `add_run`
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from rich.console import Console

    from penstock.platform.cli.dry_run import print_dry_run, print_warnings
    from penstock.platform.cli.eval import load_measurement, measure, measure_two, policies_in

    policies, overrides = policies_in(words or [])
    if len(policies) > 2:
        raise ConfigError([f"{len(policies)} policies, {', '.join(policies)}: give one, or two that are compared."])
    if len(policies) == 2 and (step is not None or best):
        raise ConfigError(["--step and --best are of one policy. Of two, name a checkpoint: RUN/checkpoints/step_N."])
    load = partial(load_measurement, step=step, best=best, to=to, config_dir=config_dir, dry_run=dry_run)
    if dry_run:
        named: list[str | None] = [*policies] or [None]
        for policy in named:
            with checking(), chdir("."):
                loaded = load(policy, overrides).loaded
            print_dry_run(loaded, "eval", Console())
        return 0
    with startable_again():
        if len(policies) == 2:
            return measure_two(policies, overrides, to, config_dir, Console())
        with checking():
            planned = load(next(iter(policies), None), overrides)
        print_warnings(planned.loaded.warnings, Console(stderr=True))
        code = with_trace(planned.folder / "error.txt", lambda: measure(planned))
        if code > EXIT_SIGNAL:
            told = f"ended by {signal.Signals(code - EXIT_SIGNAL).name}; this command starts it again:"
            print_next(told, own_command())
        return code


def add_launcher(name: Launcher, summary: str) -> None:
    """Add a command that submits a run, or prints what it would submit."""

    @launch.command(name, help=summary)
    @exits
    def start_on_nodes(
        overrides: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="experiment=NAME [KEY=VALUE]... [launch.KEY=VALUE]...",
                help="Overrides of `penstock train`, and settings of the launcher: docs/guides/launching.md.",
                show_default=False,
            ),
        ] = None,
        *,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")] = False,
        config_dir: ConfigDir = None,
    ) -> int:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        from penstock.platform.cli.launch import run_launch

        return run_launch(name, overrides or [], config_dir, dry_run=dry_run)


add_launcher("slurm", "Submit a batch script to SLURM.")
add_launcher("kuberay", "Submit a RayJob to Kubernetes with the KubeRay operator.")
add_launcher("ray", "Submit a job to a Ray cluster; --dry-run also prints what starts one.")


@launch.command("wait")
@exits
def launch_wait(
    num_nodes: Annotated[int, typer.Argument(metavar="NODES", help="Number of nodes, the head included.", min=1)],
    *,
    timeout_s: Annotated[float, typer.Option(metavar="S", help="Time limit, seconds.")] = 600.0,
) -> int:
    """Wait until a Ray cluster has so many nodes. Exit code 1 at the time limit."""
    from penstock.platform.cli.launch import run_wait

    return run_wait(num_nodes, timeout_s, typer.echo)


@app.command(no_args_is_help=True)
@exits
def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="experiment=NAME KEY=A,B [seeds=FIRST:END] [KEY=VALUE]...",
            help="KEY=A,B or GROUP=A,B: one run per combination of values. Other overrides apply to all runs.",
            show_default=False,
        ),
    ] = None,
    *,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder of runs, logs and results.")] = Path("runs/sweep"),
    cell_timeout_s: Annotated[float, typer.Option(metavar="S", help="Time limit of one run, seconds.")] = 7200.0,
    side_by_side: Annotated[int, typer.Option(min=1, help="Runs that train at the same time.")] = 1,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Stop a run whose accuracy falls behind that of the others.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list all runs without starting them.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Train once per combination of values, e.g. sweep experiment=arithmetic algorithm=grpo,rloo seeds=0:3.

    All runs are checked before the first one starts. Completed runs are skipped, so the same command continues an
    interrupted sweep. A failed run does not stop the others and is reported at the end.

    DIR/sweep.md, .csv, .json and .html are updated after every run. They list final accuracy, gain, mean staleness,
    status and run directory.
    """
    from rich.console import Console

    from penstock.platform.cli.sweep import run_sweep

    with unwinding():
        return run_sweep(
            overrides or [],
            folder=folder,
            cell_timeout_s=cell_timeout_s,
            dry_run=dry_run,
            config_dir=config_dir,
            console=Console(soft_wrap=True),
            side_by_side=side_by_side,
            stops_early=stop_early,
        )


@app.command(no_args_is_help=True)
@exits
def population(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="experiment=NAME KEY=LOW:HIGH [KEY=VALUE]...",
            help="KEY=LOW:HIGH is searched, e.g. trainer.optimizer.lr=1e-6:1e-4. Others apply to all members.",
            show_default=False,
        ),
    ] = None,
    *,
    members: Annotated[int, typer.Option(min=2, max=1000, help="Number of members.")] = 4,
    generations: Annotated[int, typer.Option(min=1, help="Number of generations.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps that every member trains in a generation.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws of keys.")] = 0,
    score: Annotated[str, typer.Option(metavar="METRIC", help="What the best has most of.")] = "eval/accuracy",
    trainable: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="Members other than runs (see docs/guides/day-two.md).")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs.")] = Path("runs/population"),
    side_by_side: Annotated[int, typer.Option(min=1, help="Members that train at the same time.")] = 1,
    member_timeout_s: Annotated[
        float, typer.Option(metavar="S", help="Time limit of a member in a generation, seconds.")
    ] = 7200.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the first members.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Train several members; after each generation the worst go on as branches of the best, with other keys.

    e.g. population experiment=arithmetic trainer.optimizer.lr=1e-6:1e-4 --members 4 --generations 5 --steps 20

    DIR/population.md, .json and .html show who began with whom. The same command continues an interrupted population.
    """
    from rich.console import Console

    from penstock.platform.cli.population import run_population

    with unwinding():
        return run_population(
            overrides or [],
            num_members=members,
            generations=generations,
            steps_per_generation=steps,
            seed=seed,
            score=score,
            trainable=trainable,
            folder=folder,
            side_by_side=side_by_side,
            timeout_s=member_timeout_s,
            dry_run=dry_run,
            config_dir=config_dir,
            console=Console(soft_wrap=True),
        )


@app.command(no_args_is_help=True)
@exits
def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory, e.g. runs/arithmetic; with --as also its upload's URL.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changed keys, e.g. total_steps=200.", show_default=False),
    ] = None,
    *,
    step: Annotated[int | None, typer.Option(help="Checkpoint to continue from. Default: the newest.")] = None,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Accept changed keys and tasks that change what the run learns.")
    ] = False,
    as_run: Annotated[
        str | None,
        typer.Option("--as", metavar="NEW", help="Begin another run at the checkpoint, and leave RUN as it is."),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            metavar="weights|optimizer|data|groups",
            help="With --as: keep the checkpoint up to this part. Default: all that the changed keys leave.",
        ),
    ] = None,
) -> int:
    """Continue an interrupted run from its newest checkpoint, exactly once; with --as, branch another run from it."""
    from penstock.platform.run.resume import resume as resume_run

    if as_run is not None:
        from penstock.platform.cli.branch import branch, branch_dir

        with startable_again():
            return with_trace(
                branch_dir(run, as_run) / "error.txt", lambda: branch(run, as_run, overrides or [], step, restore)
            )
    if restore is not None:
        raise ConfigError([f"--restore {restore}: a run that goes on keeps all. It needs another run: --as NEW."])
    if "://" in run:
        raise ConfigError([f"{run}: a run goes on in its own directory. To begin another one from there: --as NEW."])
    run_dir = Path(run)
    with startable_again():
        return with_trace(
            run_dir / "error.txt", lambda: resume_run(run_dir, overrides or [], step, allows_changed=allow_changed)
        )


@app.command(no_args_is_help=True)
@exits
def scale(
    run: RunDir,
    *,
    engines: Annotated[int, typer.Option(metavar="N", help="Number of engines that the run is to have.")],
) -> int:
    """Change the number of rollout engines of a run while it trains; returns when they have joined or left."""
    from penstock.platform.run.control import request

    console = plain_console()
    console.print(request(run, "scale", engines, lambda sentence: console.print(f"  {sentence}", markup=False)))
    return 0


@app.command("set", no_args_is_help=True)
@exits
def set_keys(
    run: RunDir,
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...", help="e.g. trainer.optimizer.lr=1e-6 total_steps=400", show_default=False
        ),
    ],
) -> int:
    """Change keys of a run while it trains: its length, learning rate, evaluations and checkpoints."""
    from penstock.platform.run.control import request

    console = plain_console()
    console.print(request(run, "set", overrides, lambda sentence: console.print(f"  {sentence}", markup=False)))
    return 0


@app.command(no_args_is_help=True)
@exits
def checkpoints(run: RunDir) -> int:
    """List the checkpoints of a run with size, step and whether they are complete."""
    from penstock.platform.cli.checkpoints import run_checkpoints

    return run_checkpoints(run, plain_console())


@app.command(no_args_is_help=True)
@exits
def export(
    run: RunDir,
    *,
    to: Annotated[str, typer.Option(metavar="DIR|hub:NAME", help="New folder, or a model on the Hugging Face Hub.")],
    step: Annotated[int | None, typer.Option(help="Step of the policy. Default: the newest that was saved.")] = None,
    best: Annotated[bool, typer.Option("--best", help="That of the best evaluation (evaluation.keep_best).")] = False,
) -> int:
    """Write the policy of a run as a Hugging Face model with a model card; adapters are merged."""
    from penstock.platform.cli.export import run_export

    return run_export(run, to, step, plain_console(), best=best)


@app.command(no_args_is_help=True)
@exits
def merge(
    parents: Annotated[
        list[str], typer.Argument(metavar="RUN|DIR...", help="Run directories, or Hugging Face folders.")
    ],
    *,
    base: Annotated[str, typer.Option(metavar="DIR", help="The model that all of them were trained from.")],
    coefficients: Annotated[str, typer.Option(metavar="W,W,...", help="Weight of each task vector, e.g. 0.5,0.5.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="New folder.")],
    method: Annotated[
        Literal["linear", "ties", "dare"],
        typer.Option(help="How they are added: all, what they agree on, or a random share."),
    ] = "linear",
    density: Annotated[
        float | None, typer.Option(metavar="X", help="Share of each task vector that ties and dare keep; in (0, 1].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draw of dare. Default: 0.")] = None,
) -> int:
    """Merge policies that were trained from the same model into one, by their task vectors.

    base + the sum of W * (policy - base), tensor by tensor, in the form and dtype of the base. Nothing is trained.
    """
    from penstock.platform.cli.merge import Recipe, run_merge

    return run_merge(parents, base, coefficients, Recipe(method, density, seed), to, plain_console())


@app.command()
@exits
def report(
    run: RunDir,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Serve it on this machine while the run goes on.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --watch; 0 takes a free one.")] = 0,
) -> int:
    """Write the report.html of a run and print its path, or serve it with --watch until Ctrl-C."""
    from penstock.platform.metrics.report import write_report
    from penstock.platform.metrics.report_server import serve_report

    if not run.is_dir():
        print_error(PenstockError(f"{run}: no such run directory. Runs are in runs/ unless run_dir says otherwise."))
        return EXIT_CONFIG
    if watch:
        asyncio.run(serve_report(run, port, lambda url: typer.echo(f"{url} (Ctrl-C ends it)")))
    else:
        typer.echo(write_report(run))
    return 0


@app.command(no_args_is_help=True)
@exits
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Run directories; they may still go on. Or two of `penstock eval`."),
    ],
) -> int:
    """Show what runs were configured differently, and what came of it, side by side.

    Of two folders of `penstock eval`: the difference of accuracy on the same tasks, and the tasks that changed.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from penstock.platform.metrics.comparison import compare as compare_runs
    from penstock.platform.metrics.evaluation_results import is_results, run_comparison
    from penstock.platform.metrics.run_record import read_run

    if any(map(is_results, runs)):
        return run_comparison(runs, Console())
    if len(runs) < 2:
        raise ConfigError([f"{len(runs)} run: give at least two run directories, e.g. runs/a runs/b."])
    console = plain_console()
    tables = zip(("result", "configuration"), compare_runs([read_run(run) for run in runs]), strict=True)
    for title, rows in tables:
        names = (Column(run.resolve().name, overflow="fold") for run in runs)
        table = Table(Column(title, no_wrap=True), *names)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    return 0


@app.command()
@exits
def doctor(
    *,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Check all nodes of a Ray cluster instead, e.g. auto or HOST:PORT."),
    ] = None,
) -> int:
    """Check this machine and its packages. Each line says what was found and how to fix it."""
    from penstock.platform.cli.doctor import run_cluster_doctor, run_doctor

    return run_doctor() if cluster is None else run_cluster_doctor(cluster, plain_console())


@app.command()
@exits
def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A preset such as dapo, a name of the catalog, or an import path."),
    ] = None,
    *,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="List only one kind, e.g. loss or correction.")
    ] = None,
) -> int:
    """List all advantages, losses, corrections and other choices, or show one in full.

    With NAME: its formulas, its settings and their sources, and what differs from the paper.
    """
    from rich.console import Console

    from penstock.platform.cli.algorithms import run_algorithms

    return run_algorithms(name, kind, Console())


@app.command()
@exits
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="e.g. profile=longtail pools=24x16+8 eta=2",
            show_default=False,
        ),
    ] = None,
    *,
    seeds: Annotated[str, typer.Option(metavar="FIRST:END", help="Seeds to run.")] = "0:1",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print the last events of each seed.")] = False,
) -> int:
    """Run the controller in virtual time on simulated devices. Exit code 1 if a run does not complete."""
    from penstock.platform.cli.simulate import run_simulate

    return run_simulate(overrides or [], seeds, as_json=as_json, shows_trace=trace)


@app.command()
@exits
def plan(
    overrides: Overrides = None,
    *,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Scale the cost model to the metrics of a run, and say how far it is off."),
    ] = None,
    answer_tokens: Annotated[
        float | None, typer.Option(help="Mean length of an answer; default: as in RUN, or half of the longest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Print the fastest predicted ways to use the devices that fit in memory, with overrides to paste. Starts nothing.

    Exit code 1 if no plan fits.
    """
    from penstock.platform.cli.plan import run_plan

    return run_plan(
        overrides or [],
        config_dir=config_dir,
        calibrate=calibrate,
        answer_tokens=answer_tokens,
        as_json=as_json,
    )


@sandbox.command("check")
@exits
def sandbox_check(
    *,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="--no-isolate shows the results on a host without isolation.")
    ] = True,
) -> int:
    """Run hostile programs in the sandbox of this machine. Exit code 1 if any of them is not contained."""
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
        str | None, typer.Option(help="Environment variable with the token that clients must send. Default: no token.")
    ] = None,
    config_dir: ConfigDir = None,
) -> int:
    """Serve this machine's sandbox to reward workers on other machines, which use sandbox=remote."""
    from penstock.platform.checks.load import load_config
    from penstock.platform.cli.sandbox import run_sandbox_service

    config = load_config("train", overrides or [], config_dir=config_dir, dry_run=True).config.sandbox
    return run_sandbox_service(config, host, port, token_variable)


@environments.command("list")
@exits
def env_list() -> int:
    """List built-in and installed environments."""
    from penstock.platform.cli.env import run_env_list

    return run_env_list(plain_console())


@environments.command("show")
@exits
def env_show(factory: Factory, args: EnvArgs = None, *, python: Python = None) -> int:
    """Print the arguments and the first tasks of an environment."""
    from penstock.platform.cli.env import run_env_show

    return run_env_show(factory, args or [], plain_console(), python)


@environments.command("check")
@exits
def env_check(
    factory: Factory,
    args: EnvArgs = None,
    *,
    max_turns: Annotated[int, typer.Option(help="Turn limit, as env.episode.max_turns.")] = 12,
    timeout_s: Annotated[float, typer.Option(help="Time limit in seconds, as env.episode.timeout_s.")] = 30.0,
    reward: Annotated[str | None, typer.Option(help="Reward function of single-turn tasks, as reward.fn.")] = None,
    style: Annotated[
        str | None, typer.Option(help="As reward.style: trl or verl, for a reward function written for them.")
    ] = None,
    isolation: Isolation = None,
    python: Python = None,
) -> int:
    """Check types, determinism, speed and rewards of an environment by playing it with a scripted agent.

    Exit code 1 if a check fails.
    """
    from penstock.platform.cli.env import run_env_check

    console = plain_console()
    return run_env_check(factory, args or [], max_turns, timeout_s, reward, style, isolation, console, python)


@environments.command("play")
@exits
def env_play(factory: Factory, args: EnvArgs = None, *, isolation: Isolation = None, python: Python = None) -> int:
    """Play one episode by hand. An empty line ends it."""
    from penstock.platform.cli.env import run_env_play

    return run_env_play(factory, args or [], input, plain_console(), isolation, python)


def main() -> None:
    """Console entry point."""
    # This process does no tensor computation. Trainer ranks set their own accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Our own error reports a failed download once, instead of a warning at every retry.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # Otherwise Ray answers SIGTERM with a C++ stack trace.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    # Ray prints a paragraph of possible causes for every worker that dies. The run supervises all of them: it says
    # which one was lost and what it does about it. Ray reads this when it is imported. It still reports workers that it
    # kills itself for want of memory.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^A worker died or was killed while executing a task")
    # Lets `reward.fn=my_module.my_reward` find a module in the working directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    app()


if __name__ == "__main__":
    main()
