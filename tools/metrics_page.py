"""docs/metrics.md, rendered from platform/metrics/catalog.yaml: python tools/metrics_page.py > docs/metrics.md"""

from __future__ import annotations

import sys

from penstock.platform.metrics.hub import catalog

_FAMILIES = {
    "reward": "What the policy earns.",
    "env": "What happens in multi-turn episodes.",
    "length": "How long its answers are.",
    "loss": "The optimizer step.",
    "critic": "How well the critic of `algorithm.advantage: gae` predicts returns.",
    "ratio": "How far the policy that sampled the tokens is from the policy that is trained.",
    "mismatch": "How far the engine's logprobs are from the trainer's.",
    "routing": "The experts of a mixture that engines recorded, and those that the trainer would choose.",
    "staleness": "How old the trained tokens are, in policy versions.",
    "flow": "Groups and credits: the ledger in numbers.",
    "stream": "How admissions are divided among several task streams (`env.streams`, curricula, stages).",
    "throughput": "Speed of generation and training.",
    "idle": "How long trainer and engines wait.",
    "weights": "Publishing of new weights to the engines.",
    "checkpoint": "Checkpoints, from which `penstock resume` continues.",
    "config": "Keys of the configuration that `penstock set` has changed.",
    "memory": "Main memory, not that of devices, of all processes of the run on the driver's machine.",
    "eval": "Evaluation on held-out tasks ([guide](guides/evaluation.md)).",
    "trainer": "Computation of the trainer.",
    "partner": "The second policy of a run with two policies (`partner` in the configuration).",
    "rank": "Speed of each trainer rank, and their consistency (with several).",
    "engine": "Each engine.",
    "preference": "Learning from preference pairs (`penstock rm`, `penstock dpo`).",
    "sft": "Supervised warm start (`penstock sft`).",
}

_INTRO = """\
# Metrics

<!-- Rendered: python tools/metrics_page.py > docs/metrics.md -->

These are all metrics that Penstock logs to `metrics.jsonl`, the console and the trackers. Logging a
name that is not declared here is an error. A share is between 0 and 1. Terms are defined in
[the vocabulary](architecture.md). Staleness is counted in policy versions and refers to the tokens trained in a step.
`*` stands for a variable part of the name, such as the name of a reward.

The columns of the console:

| column | metric |
|---|---|
| reward, mean | `reward/mean` of the trained answers, which are sampled |
| eval, share | `eval/accuracy` of the newest evaluation; greedy decoding is mostly better than sampling |
| eval, mean | `eval/reward_mean`, while no answer has solved its task and rewards are graded |
| staleness, mean/max | `staleness/mean_versions`, `staleness/max_versions` |
| sampled, trained | `throughput/generated_tokens_per_s`, `throughput/trained_tokens_per_s` |
| idle, train/eng | `idle/trainer_share`, `idle/engine_share` |
| left | estimated remaining time at the average speed so far |
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
