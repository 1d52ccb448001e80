"""What `fidelity.py` measured: its cells, intervals over seeds, the table and the plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import ceil, sqrt
from statistics import mean, stdev
from typing import Any, Self

from alone import ROOT

TABLE = ROOT / "benchmarks" / "results" / "fidelity.md"
IMAGE = ROOT / "docs" / "images" / "fidelity.svg"
ARMS = ((0, "none"), *product((2, 8), ("uncorrected", "decoupled", "TIS")))
"""(η, correction) of the cells of one task and seed. With η = 0 there is nothing to correct."""
MARGIN = 0.02
"""A smaller loss of accuracy than this counts as none."""
T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantile of Student's t with 1, 2, … 9 degrees of freedom."""
_HEADER = (
    "task", "η", "correction", "n", "accuracy", "minus η = 0", f"loss below {MARGIN}", "stale tokens",
    "mean staleness, versions", "steps, s", "÷ η = 0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the comparison; `correction` is one of `ARMS`."""

    task: str
    max_staleness: int
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-eta{self.max_staleness}-{self.correction}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How one cell ended, where and with what; the figures are None unless it completed.

    Attributes:
        cell: The cell.
        status: `completed` or `failed`.
        settings: Overrides of its `penstock train`, without paths.
        policy: Checksum of the policy that it started from.
        commit: Commit that ran.
        machine: Processor, cores, memory and system.
        versions: Package -> version.
        reason: Why it failed.
        start_accuracy: Greedy held-out accuracy before the first step.
        accuracy: The same after the last step.
        wall_s: Seconds from the start of the run to its end.
        steps_s: Seconds of its training steps, without start and evaluations.
        stale_token_share: Share of trained tokens with a staleness of 1 or more.
        mean_staleness: Mean staleness of the trained tokens, versions.
        trained_groups: Groups trained.
        others_percent: Share of all cores that other programs had meanwhile.
    """

    cell: Cell
    status: str
    settings: list[str]
    policy: str
    commit: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    start_accuracy: float | None = None
    accuracy: float | None = None
    wall_s: float | None = None
    steps_s: float | None = None
    stale_token_share: float | None = None
    mean_staleness: float | None = None
    trained_groups: int | None = None
    others_percent: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A flat row of the results file, without what was not measured."""
        row = asdict(self)
        return {key: value for key, value in (row.pop("cell") | row).items() if value not in (None, "", {})}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        of_cell = Cell.__dataclass_fields__
        cell = Cell(**{key: row[key] for key in of_cell})
        return cls(cell=cell, **{key: value for key, value in row.items() if key not in of_cell})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over n seeds and its 95 % interval.

    Attributes:
        center: x̄.
        half_width: t(0.975, n − 1) · s / √n with the standard deviation s of a sample; None if n is 1.
    """

    center: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of one value per seed, 1 to 10 values."""
        count = len(values)
        return cls(mean(values), T_975[count - 2] * stdev(values) / sqrt(count) if count > 1 else None)

    def text(self, sign: str = "") -> str:
        """`0.912 ± 0.013`, or the value alone."""
        return f"{self.center:{sign}.3f}" + ("" if self.half_width is None else f" ± {self.half_width:.3f}")

    @property
    def loss_is_small(self) -> str:
        """Whether a difference shows a loss below `MARGIN`: `yes` or `no` if its whole interval does, else `open`."""
        if self.half_width is None:
            return "open"
        low, high = self.center - self.half_width, self.center + self.half_width
        return "yes" if low > -MARGIN else "no" if high < -MARGIN else "open"


Seeds = Mapping[int, Record]
Table = Mapping[str, Mapping[tuple[int, str], Seeds]]
"""Task -> (η, correction) -> seed -> completed run."""


def comparable(records: Iterable[Record], settings_of: Callable[[Cell], list[str]]) -> Table:
    """The completed runs with today's settings. Those of one task and seed started from one policy.

    If there are several policies, the one with the most completed cells counts, of several the newest.
    """
    by_policy: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for record in records:
        if record.status == "completed" and record.settings == settings_of(record.cell):
            of_seed = by_policy.setdefault((record.cell.task, record.cell.seed), {})
            of_seed.setdefault(record.policy, []).append(record)
    table: dict[str, dict[tuple[int, str], dict[int, Record]]] = {}
    for (task, seed), policies in by_policy.items():
        arms = table.setdefault(task, {arm: {} for arm in ARMS})
        for record in max(reversed(policies.values()), key=len):
            arms[record.cell.max_staleness, record.cell.correction][seed] = record
    return table


def values(runs: Seeds, key: str) -> list[float]:
    """One figure of each seed."""
    return [getattr(run, key) for run in runs.values()]


def difference(runs: Seeds, baseline: Seeds, key: str = "accuracy") -> list[float]:
    """Figure minus that of η = 0 with the same seed, for the seeds that have both."""
    return [getattr(run, key) - getattr(baseline[seed], key) for seed, run in runs.items() if seed in baseline]


def rows(table: Table) -> list[list[str]]:
    """One row per task, η and correction that has run."""
    lines = []
    for task, arms in table.items():
        baseline = arms[ARMS[0]]
        for (eta, correction), runs in arms.items():
            if not runs:
                continue
            paired = difference(runs, baseline) if eta else []
            minus = Estimate.of(paired) if paired else None
            steps_s, baseline_s = mean(values(runs, "steps_s")), values(baseline, "steps_s")
            lines.append(
                [
                    task,
                    str(eta),
                    correction if eta else "–",
                    str(len(runs)),
                    Estimate.of(values(runs, "accuracy")).text(),
                    minus.text("+") if minus else "–",
                    minus.loss_is_small if minus else "–",
                    f"{mean(values(runs, 'stale_token_share')):.0%}",
                    f"{mean(values(runs, 'mean_staleness')):.2f}",
                    f"{steps_s:.0f}",
                    f"{steps_s / mean(baseline_s):.2f}" if eta and baseline_s else "–",
                ]
            )
    return lines


def notes(records: Sequence[Record], table: Table, settings_of: Callable[[Cell], list[str]]) -> list[str]:
    """One sentence each on the measure, the settings, where the runs were, and what is not in the table."""
    runs = [run for arms in table.values() for seeds in arms.values() for run in seeds.values()]
    failed = [record for record in records if record.status == "failed" and record.settings == settings_of(record.cell)]
    older = sum(record.settings != settings_of(record.cell) for record in records)
    lines = [
        "accuracy: greedy, on held-out tasks, after the last step; mean over n seeds ± half of the 95 % interval of "
        "Student's t over seeds",
        f"minus η = 0: the same of the differences within seeds; loss below {MARGIN}: whether this interval is above "
        f"−{MARGIN} (yes), below it (no) or neither (open)",
        "steps: seconds of all training steps, without start and evaluations",
    ]
    for task, arms in table.items():
        of_task = [run for seeds in arms.values() for run in seeds.values()]
        starts = sorted({f"{run.start_accuracy:.3f}" for run in of_task})
        groups = sorted({run.trained_groups or 0 for run in of_task})
        shared = " ".join(value for value in of_task[0].settings if not value.startswith(_OF_A_CELL))
        lines.append(
            f"{task}: accuracy before the first step {', '.join(starts)}; {', '.join(map(str, groups))} groups "
            f"trained; `penstock train {shared}`"
        )
    lines += [
        f"{what}: {'; '.join(dict.fromkeys(getattr(run, what) for run in runs))}" for what in ("commit", "machine")
    ]
    versions = dict.fromkeys(", ".join(f"{name} {version}" for name, version in run.versions.items()) for run in runs)
    lines.append(f"versions: {'; '.join(versions)}")
    lines.append(f"others had up to {max(run.others_percent or 0 for run in runs):.0f} % of the cores during a run")
    lines += [f"failed: {record.cell.name}: {record.reason}" for record in failed]
    return lines + ([f"{older} runs with other settings are in fidelity.json and not in the table"] if older else [])


_OF_A_CELL = ("algorithm/correction=", "dataflow.max_staleness=", "seed=")


def write_report(records: Sequence[Record], settings_of: Callable[[Cell], list[str]]) -> None:
    """Write the table and the plot; nothing if no cell has completed."""
    table = comparable(records, settings_of)
    if not table:
        return
    lines = ["| " + " | ".join(row) + " |" for row in (_HEADER, ["---"] * len(_HEADER), *rows(table))]
    text = ["# What asynchrony costs in accuracy", "", "By `make fidelity`.", "", *lines, ""]
    TABLE.write_text("\n".join([*text, *(f"- {note}" for note in notes(records, table, settings_of))]) + "\n")
    plot(table)


def plot(table: Table) -> None:
    """Accuracy over the time of the steps, one panel per task: colors are corrections, marks are η."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    colors = {"none": "#444444", "uncorrected": "#c0392b", "decoupled": "#1b6ca8", "TIS": "#2e8b57"}
    marks = {0: "*", 2: "o", 8: "s"}
    mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "penstock", "svg.fonttype": "none"})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    columns = min(len(table) + 1, 3)  # the legend is in the cell after the last task
    num_rows = ceil((len(table) + 1) / columns)
    size = (3.4 * columns, 3.4 * num_rows)
    figure, axes = plt.subplots(num_rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(table) :]:
        axis.set_axis_off()
    for axis, (task, arms) in zip(axes.flat, table.items(), strict=False):
        for (eta, correction), runs in arms.items():
            if not runs:
                continue
            accuracy = Estimate.of(values(runs, "accuracy"))
            label = f"η = {eta}" + (f", {correction}" if eta else "")
            axis.errorbar(
                [mean(values(runs, "steps_s"))], [accuracy.center], yerr=accuracy.half_width, label=label,
                color=colors[correction], marker=marks[eta], capsize=3, linestyle="none",
            )  # fmt: skip
        axis.set(title=task, xlabel="seconds of all steps", ylim=(0, 1), xlim=(0, 1.1 * axis.dataLim.xmax))
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out accuracy, 95 % interval")
    handles, labels = axes[0][0].get_legend_handles_labels()
    axes.flat[len(table)].legend(handles, labels, frameon=False, loc="center")
    IMAGE.parent.mkdir(exist_ok=True)
    figure.savefig(IMAGE, metadata={"Date": None})
    plt.close(figure)
