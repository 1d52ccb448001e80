"""How a command ends, and the arguments that several share.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from penstock.dataflow.errors import ConfigError, PenstockError

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


def exit_with(body: Callable[[], int]) -> None:
    """Run a command's body; turn what it returns or raises into an exit code and at most one readable error."""
    try:
        code = body()
    except ConfigError as error:
        print_error(error)
        code = EXIT_CONFIG
    except PenstockError as error:
        print_error(error)
        code = EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_SIGNAL + 2
    raise typer.Exit(code)


def print_error(error: PenstockError) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print("error:", str(error), style="red", markup=False)
