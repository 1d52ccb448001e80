"""`penstock algorithms`: prints the choices of the `algorithm` section from the catalog."""

from __future__ import annotations

from pathlib import PurePosixPath

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint
from penstock.trainer.algorithms.catalog import ALGORITHMS, KINDS

_ARXIV_DIGITS = 9


def run_algorithms(kind: str | None, console: Console) -> int:
    """Print the table of one kind, or of all kinds; returns the exit code.

    Raises:
        ConfigError: If the kind is unknown.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError([f"--kind {kind} is unknown. Kinds: {', '.join(KINDS)}.{nearest_hint(kind, KINDS)}"])
    for shown in KINDS if kind is None else (kind,):
        table = Table(title=shown, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("name", "formula", "source", "where"):
            table.add_column(column, overflow="fold")
        for algorithm in ALGORITHMS:
            if algorithm.kind == shown:
                where = PurePosixPath(algorithm.file).name
                source = f"arXiv {algorithm.source}" if is_arxiv(algorithm.source) else algorithm.source
                table.add_row(algorithm.name, algorithm.formula, source, where)
        console.print(table)
    console.print(
        "where: file in trainer/algorithms. "
        "b, p, c, r: behavior, proximal, target, reference logprob; ρ = exp(c − p); w = exp(p − b); A advantage; "
        "R reward; n_i tokens of N sequences. Papers: docs/paper_index.md.",
        style="dim",
        markup=False,
    )
    return 0


def is_arxiv(text: str) -> bool:
    """Whether a text is an arXiv id such as `2402.03300`."""
    digits = text.replace(".", "")
    return len(digits) == _ARXIV_DIGITS and digits.isdigit()
