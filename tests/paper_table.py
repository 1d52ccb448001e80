"""The table of docs/paper_index.md, from the catalog of algorithms: python -m tests.paper_table"""

from __future__ import annotations

from penstock.platform.cli.algorithms import is_arxiv
from penstock.trainer.algorithms.catalog import ALGORITHMS, Algorithm

_SETTINGS = {
    "kl": "kl_estimator={name}",
    "reward_shaping": "{name}",
    "token_weighting": "{name}",
    "overlong_penalty": "overlong=penalty",
}
"""Kind, or name, -> how it is chosen, where that is not `kind=name`."""


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


if __name__ == "__main__":
    print(paper_table())
