"""Speed, bias and lost tokens over η for the expiry policies: one plot and one table, from the simulator.

    python benchmarks/staleness_plots.py [--seeds 3]     (4 minutes; writes docs/images and docs/concepts/staleness.md)

The figures are those of `python benchmarks/comparisons.py evict-bias`: the shipping controller in virtual time.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from comparisons import evict_bias

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "concepts" / "staleness.md"
IMAGE = DOCS / "images" / "staleness-policies.svg"
PANELS = (
    ("speed", "speed ÷ best synchronous"),
    ("kept_p99", "share of the longest percent kept"),
    ("trimmed_token_share", "share of tokens that lose their weight"),
)
STYLES = {
    "wait": {"color": "#1b6ca8", "linestyle": "--", "marker": "o"},
    "wait streamed": {"color": "#1b6ca8", "linestyle": "-", "marker": "o"},
    "trim streamed": {"color": "#2e8b57", "linestyle": "-", "marker": "s"},
    "drop streamed": {"color": "#c0392b", "linestyle": "-", "marker": "^"},
}
_LINE = re.compile(r"(?P<policy>.+) eta=(?P<eta>\d+)")
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.DOTALL)


def series(figures: dict[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    """Policy -> η -> figures."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, values in figures.items():
        if (match := _LINE.fullmatch(name)) is not None:
            found.setdefault(match["policy"], {})[int(match["eta"])] = values
    return found


def plot(policies: dict[str, dict[int, dict[str, float]]]) -> None:
    """Three panels over η."""
    mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "penstock", "axes.spines.top": False})
    mpl.rcParams["axes.spines.right"] = False
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        for policy, by_eta in policies.items():
            axis.plot(list(by_eta), [values[key] for values in by_eta.values()], label=policy, **STYLES[policy])
        axis.set(title=title, xlabel="max_staleness η", xscale="log", ylim=(0, None))
        etas = sorted(next(iter(policies.values())))
        axis.set_xticks(etas, [str(eta) for eta in etas])
        axis.minorticks_off()
    axes[0].axhline(1.0, color="#999999", linewidth=0.8)
    axes[1].legend(frameon=False, loc="lower right")
    IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(IMAGE, metadata={"Date": None})


def table(policies: dict[str, dict[int, dict[str, float]]]) -> str:
    """One line per policy and η."""
    lines = ["| policy | η | speed | trained ÷ population length | longest percent kept | tokens trimmed |"]
    lines.append("|---|---|---|---|---|---|")
    lines += [
        f"| {policy} | {eta} | {v['speed']:.2f} | {v['length_bias']:.2f} | {v['kept_p99']:.2f} | "
        f"{100 * v['trimmed_token_share']:.0f} % |"
        for policy, by_eta in policies.items()
        for eta, v in by_eta.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    policies = series(evict_bias(range(seeds)))
    plot(policies)
    page = _TABLE.sub(
        lambda match: match[1] + f"Mean over {seeds} seeds.\n\n" + table(policies) + match[2], PAGE.read_text()
    )
    PAGE.write_text(page)
    print(f"wrote {IMAGE.relative_to(DOCS.parent)} and the table of {PAGE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
