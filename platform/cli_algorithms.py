"""`penstock algorithms`: what can be chosen in the `algorithm` section, from the catalog itself.

`python -m penstock.platform.cli_algorithms` prints the same as the table of docs/paper_index.md.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint
from penstock.trainer.algorithms.catalog import ALGORITHMS, KINDS, Algorithm

_ARXIV_DIGITS = 9
_SETTINGS = {
    "kl": "kl_estimator={name}",
    "reward_shaping": "{name}",
    "token_weighting": "{name}",
    "overlong_penalty": "overlong=penalty",
}
"""Kind, or name, -> how it is chosen, where that is not `kind=name`."""


def run_algorithms(kind: str | None, console: Console) -> int:
    """Print a table of one kind, or of each; returns the exit code.

    Raises:
        ConfigError: If there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError([f"--kind {kind} is none. Kinds: {', '.join(KINDS)}.{nearest_hint(kind, KINDS)}"])
    for shown in KINDS if kind is None else (kind,):
        table = Table(title=shown, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("name", "formula", "source", "where"):
            table.add_column(column, overflow="fold")
        for algorithm in ALGORITHMS:
            if algorithm.kind == shown:
                where = PurePosixPath(algorithm.file).name
                table.add_row(algorithm.name, algorithm.formula, source(algorithm.source), where)
        console.print(table)
    console.print(
        "where: file in trainer/algorithms. "
        "b, p, c, r: behavior, proximal, target, reference logprob; ρ = exp(c − p); w = exp(p − b); A advantage; "
        "R reward; n_i tokens of N sequences. Papers: docs/paper_index.md.",
        style="dim",
        markup=False,
    )
    return 0


def paper_table() -> str:
    """All of the catalog as Markdown, one row each."""
    rows = ["| kind | setting `algorithm.…` | equation | file | source |", "|---|---|---|---|---|"]
    for one in ALGORITHMS:
        link = f"[{one.source}](https://arxiv.org/abs/{one.source})" if is_arxiv(one.source) else one.source
        rows.append(f"| {one.kind} | `{setting(one)}` | `{one.formula}` | `{one.file}` | {link} |")
    return "\n".join(rows)


def setting(algorithm: Algorithm) -> str:
    """How it is chosen in the `algorithm` section."""
    pattern = _SETTINGS.get(algorithm.name) or _SETTINGS.get(algorithm.kind, "{kind}={name}")
    return pattern.format(kind=algorithm.kind, name=algorithm.name)


def source(text: str) -> str:
    """An arXiv id says so."""
    return f"arXiv {text}" if is_arxiv(text) else text


def is_arxiv(text: str) -> bool:
    """`2402.03300`."""
    digits = text.replace(".", "")
    return len(digits) == _ARXIV_DIGITS and digits.isdigit()


if __name__ == "__main__":
    print(paper_table())
