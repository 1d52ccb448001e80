"""Every metric name, declared once (`metrics.yaml`): unit, meaning, healthy range, where it is measured.

`python -m penstock.platform.observability.catalog > docs/metrics.md` renders the page; a test holds both together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import yaml

_FAMILIES = {
    "reward": "What the policy earns.",
    "env": "What happens in multi-turn episodes.",
    "length": "How long its answers are.",
    "loss": "The optimizer step.",
    "critic": "How well the critic of `algorithm.advantage: gae` foresees what is to come.",
    "ratio": "How far the trained tokens are from the policy that is trained.",
    "mismatch": "How far the engine's logprobs are from the trainer's.",
    "staleness": "How old the trained tokens are, in policy versions.",
    "flow": "Groups and credits: the ledger in numbers.",
    "stream": "What share of admissions each of several streams of tasks gets (`env.streams`, curricula, stages).",
    "throughput": "How fast it goes.",
    "idle": "Who waits for whom.",
    "weights": "Publishing new weights to the engines.",
    "checkpoint": "Snapshots.",
    "memory": "Memory of all processes of the run on the driver's machine.",
    "eval": "Greedy evaluation on held-out tasks.",
    "trainer": "The trainer's own work.",
    "partner": "The other policy of a run with two (`partner` in the configuration).",
    "rank": "Whether the trainer's ranks agree (only with several).",
    "preference": "Learning from pairs of answers.",
    "sft": "Supervised warm-up (`penstock sft`).",
}

_INTRO = """\
# Metrics

<!-- Rendered: python -m penstock.platform.observability.catalog > docs/metrics.md -->

Every name that Penstock logs, to every sink: `metrics.jsonl`, console, Weights & Biases, TensorBoard. A name that is
not declared here is refused when it is logged. A share is between 0 and 1. Terms are those of
[the vocabulary](architecture.md): staleness is counted in policy versions, and of a step it is that of the tokens
trained in it. `*` stands for a name chosen by the user, such as that of a reward.

The columns of the console:

| column | metric |
|---|---|
| reward, mean | `reward/mean` of the trained (sampled) answers |
| eval, share | `eval/accuracy` of the newest evaluation: greedy, so mostly higher than the sampled reward |
| staleness, mean/max | `staleness/mean_versions`, `staleness/max_versions` |
| sampled, trained | `throughput/generated_tokens_per_s`, `throughput/trained_tokens_per_s` |
| idle, train/eng | `idle/trainer_share`, `idle/engine_share` |
| left | time left, at the pace so far |
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric name.

    Attributes:
        name: `family/name`; a trailing `*` declares every name with that prefix.
        unit: Unit of the value.
        meaning: What one value says.
        healthy: What to expect, and what a departure means.
        where: Which part of the run measures it.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    where: str

    @property
    def family(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]


@cache
def catalog() -> Mapping[str, Metric]:
    """All declared metrics, `name -> Metric`, in the order of the page."""
    text = (Path(__file__).parent / "metrics.yaml").read_text(encoding="utf-8")
    return MappingProxyType({name: Metric(name=name, **entry) for name, entry in yaml.safe_load(text).items()})


def find_metric(name: str) -> Metric | None:
    """The declaration that covers `name`, or None."""
    if "*" in name:
        return None
    if name in catalog():
        return catalog()[name]
    for metric in catalog().values():
        if metric.name.endswith("*") and len(name) >= len(metric.name) and name.startswith(metric.name[:-1]):
            return metric
    return None


def undeclared(names: Iterable[str]) -> list[str]:
    """Those of `names` that no declaration covers, sorted."""
    return sorted(name for name in names if find_metric(name) is None)


def render_markdown() -> str:
    """The text of `docs/metrics.md`."""
    lines = [_INTRO]
    for family, sentence in _FAMILIES.items():
        metrics = [metric for metric in catalog().values() if metric.family == family]
        if not metrics:
            continue
        lines += [
            f"## {family}/",
            "",
            sentence,
            "",
            "| name | unit | meaning | healthy | measured by |",
            "|---|---|---|---|---|",
        ]
        for metric in metrics:
            cells = (f"`{metric.name}`", metric.unit, metric.meaning, metric.healthy, metric.where)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
