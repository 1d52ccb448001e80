"""docs/metrics.md, rendered from platform/metrics/catalog.yaml: python -m tests.metrics_page > docs/metrics.md"""

from __future__ import annotations

import sys

from penstock.platform.metrics.hub import catalog

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

<!-- Rendered: python -m tests.metrics_page > docs/metrics.md -->

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


def render_markdown() -> str:
    """The text of `docs/metrics.md`."""
    lines = [_INTRO]
    for family, sentence in _FAMILIES.items():
        lines += [
            f"## {family}/",
            "",
            sentence,
            "",
            "| name | unit | meaning | healthy | measured by |",
            "|---|---|---|---|---|",
        ]
        for name, metric in catalog().items():
            if name.startswith(f"{family}/"):
                cells = (f"`{name}`", metric["unit"], metric["meaning"], metric["healthy"], metric["where"])
                lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
