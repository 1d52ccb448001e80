"""The table of docs/paper_index.md, from the catalog of algorithms: python tools/paper_table.py"""

from __future__ import annotations

from penstock.platform.cli.algorithms import is_arxiv
from penstock.trainer.algorithms.catalog import Entry, entries

_SETTINGS = {
    "advantage": "algorithm/advantage={name}",
    "loss": "algorithm/loss={name}",
    "correction": "algorithm/correction={name}",
    "kl": "algorithm.kl.estimator={name}",
    "entropy_bonus": "algorithm.entropy.coefficient",
    "adaptive_entropy": "algorithm.entropy.target",
    "adaptive_kl": "algorithm.kl.target",
    "bootstrap": "algorithm.advantage.bootstrap=true",
    "reward_shaping": "algorithm.{name}",
    "token_weighting": "algorithm.{name}",
    "auxiliary_loss": "algorithm.{name}",
    "overlong_penalty": "algorithm.overlong.mode=penalty",
    "value": "the loss of a critic",
}
"""Kind, or name, -> how it is chosen, where that is not `algorithm.kind=name`."""


def paper_table() -> str:
    """All of the catalog as Markdown, one row each."""
    rows = ["| kind | setting | equation | file | source |", "|---|---|---|---|---|"]
    for one in entries():
        link = f"[{one.source}](https://arxiv.org/abs/{one.source})" if is_arxiv(one.source) else one.source
        rows.append(f"| {one.kind} | `{setting(one)}` | `{one.formula}` | `{one.file}` | {link} |")
    return "\n".join(rows)


def setting(algorithm: Entry) -> str:
    """How it is chosen on a command line."""
    pattern = _SETTINGS.get(algorithm.name) or _SETTINGS.get(algorithm.kind, "algorithm.{kind}={name}")
    return pattern.format(kind=algorithm.kind, name=algorithm.name)


if __name__ == "__main__":
    print(paper_table())
