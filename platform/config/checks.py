"""Cross-field checks: combinations of valid values that cannot run, or not well. Pure, no machine is looked at.

When a run cannot deadlock. A batch of B groups is trained when B groups are ready, and `wait` holds it open for
the oldest ones. That always ends if every live group can finish: (1) an engine has a slot and a KV cache that holds
one trajectory of full length, so the engine's queue, which is first come first served, always moves; (2) a group whose
members failed can still be trained, min_group_size <= group_size; (3) the trainer can take every trajectory,
max_tokens_per_micro_batch >= max_context_tokens; (4) colocated roles never wait for each other's device,
max_staleness = 0. The admission gate (η + 1)·B >= B always lets a whole batch live at once. So neither the number of
slots nor η nor B can deadlock a run by itself; too few slots only make it slow, and that is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from penstock.platform.config.checks_cluster import CLUSTER_CHECKS
from penstock.platform.config.findings import Command, Finding
from penstock.platform.config.schema import RunConfig

Check = Callable[[RunConfig], list[Finding]]
_MAX_WAVES = 8


def check_config(config: RunConfig, command: Command) -> list[Finding]:
    """Run every check that concerns `command`."""
    findings = check_pools(config)
    checks = _CHECKS[command] + (() if findings else CLUSTER_CHECKS[command])
    return findings + [finding for check in checks for finding in check(config)]


def check_model(config: RunConfig) -> list[Finding]:
    """Heads must share keys evenly; flash attention needs half precision."""
    shape, model = config.model.shape, config.model
    findings = []
    if shape.num_heads % shape.num_kv_heads:
        findings.append(
            Finding(
                f"model.shape.num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}: "
                "query heads could not share key/value heads evenly. Copy both from the checkpoint's config.json.",
                ("model.shape.num_heads", "model.shape.num_kv_heads"),
            )
        )
    if model.attention == "flash_attention_2" and model.dtype == "float32":
        findings.append(
            Finding(
                "model.attention=flash_attention_2 does not work in model.dtype=float32: its kernels take 16-bit numbers "
                "only. Use model.dtype=bfloat16 or model.attention=sdpa.",
                ("model.attention", "model.dtype"),
            )
        )
    return findings


def check_has_policy(config: RunConfig) -> list[Finding]:
    """`train` and `eval` start from a policy."""
    keys = ("model.path", "model.from_scratch")
    if config.model.from_scratch:
        return [
            Finding(
                "model.from_scratch=true is only for `penstock sft`: random weights never earn a reward to learn from. "
                "Set model.from_scratch=false and model.path to a policy.",
                keys,
            )
        ]
    if config.model.path is None:
        return [Finding("model.path is not set: there is no policy to start from. Give a directory or a hub name.", keys)]
    return []


def check_sft_section(config: RunConfig) -> list[Finding]:
    """`sft` needs its section, a start and equal work for the ranks."""
    findings = []
    if config.sft is None:
        return [
            Finding(
                "sft is not set, so `penstock sft` does not know batch size and length. "
                "Use experiment=arithmetic_sft or add an sft section.",
                ("sft",),
            )
        ]
    if not config.model.from_scratch and config.model.path is None:
        findings.append(
            Finding("model.path is not set. Give a directory, or model.from_scratch=true.", ("model.path", "model.from_scratch"))
        )
    return findings + _unequal_work("sft.batch_size", config.sft.batch_size, config.trainer.num_ranks)


def check_batch(config: RunConfig) -> list[Finding]:
    """Ranks get equal work; a group can lose members and still be trained."""
    flow = config.dataflow
    findings = _unequal_work("dataflow.batch_groups", flow.batch_groups, config.trainer.num_ranks)
    if flow.min_group_size > flow.group_size:
        findings.append(
            Finding(
                f"dataflow.min_group_size={flow.min_group_size} is above group_size={flow.group_size}: no group could ever "
                f"be trained and the run would wait for ever. Use 2..{flow.group_size}.",
                ("dataflow.min_group_size", "dataflow.group_size"),
            )
        )
    return findings


def check_trainer(config: RunConfig) -> list[Finding]:
    """What the backends can do, and whether a trajectory fits a micro-batch."""
    trainer, context = config.trainer, config.model.max_context_tokens
    findings = []
    if trainer.backend == "torch" and (trainer.num_ranks > 1 or trainer.zero_stage > 0):
        findings.append(
            Finding(
                f"trainer.backend=torch runs one rank that shards nothing, not num_ranks={trainer.num_ranks} and "
                f"zero_stage={trainer.zero_stage}. Use trainer.backend=deepspeed, or num_ranks=1 and zero_stage=0.",
                ("trainer.backend", "trainer.num_ranks", "trainer.zero_stage"),
            )
        )
    if trainer.offload_optimizer and (trainer.zero_stage == 0 or trainer.backend == "torch"):
        findings.append(
            Finding(
                f"trainer.offload_optimizer=true needs DeepSpeed with zero_stage >= 1, not {trainer.backend} with "
                f"zero_stage={trainer.zero_stage}: only a sharded optimizer can leave the device. Use zero_stage=1.",
                ("trainer.offload_optimizer", "trainer.zero_stage", "trainer.backend"),
            )
        )
    if trainer.max_tokens_per_micro_batch < context:
        findings.append(
            Finding(
                f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below "
                f"model.max_context_tokens={context}: a trajectory of full length could never be trained. "
                f"Use at least {context}.",
                ("trainer.max_tokens_per_micro_batch", "model.max_context_tokens"),
            )
        )
    if not all(0 <= beta < 1 for beta in trainer.optimizer.betas):
        findings.append(
            Finding(
                f"trainer.optimizer.betas={list(trainer.optimizer.betas)} is out of range: each must be in [0, 1).",
                ("trainer.optimizer.betas",),
            )
        )
    return findings


def check_sampling(config: RunConfig) -> list[Finding]:
    """Full support, and room for an answer."""
    sampling, context = config.rollout.sampling, config.model.max_context_tokens
    findings = []
    if sampling.top_p < 1 or sampling.top_k != -1:
        findings.append(
            Finding(
                f"rollout.sampling.top_p={sampling.top_p} top_k={sampling.top_k} cuts the sampling support: the engine "
                "renormalises over what is left and the trainer does not, so every importance ratio would carry the cut "
                "mass. Use top_p=1.0 and top_k=-1; lower the temperature instead.",
                ("rollout.sampling.top_p", "rollout.sampling.top_k"),
            )
        )
    if sampling.max_new_tokens >= context:
        findings.append(
            Finding(
                f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
                f"model.max_context_tokens={context}: prompt and answer share the context. "
                f"Use less than {context}, or a longer context.",
                ("rollout.sampling.max_new_tokens", "model.max_context_tokens"),
            )
        )
    return findings


def check_flow(config: RunConfig) -> list[Finding]:
    """Settings that work but hurt."""
    flow, rollout = config.dataflow, config.rollout
    findings = []
    live = (flow.max_staleness + 1) * flow.batch_groups * flow.group_size
    slots = rollout.num_engines * rollout.engine.max_num_seqs
    if live > _MAX_WAVES * slots:
        findings.append(
            Finding(
                f"dataflow: up to {live} trajectories are live, (max_staleness + 1) x batch_groups x group_size, but the "
                f"engines decode {slots} at once: most of their staleness is spent in a queue. Raise "
                "rollout.engine.max_num_seqs or rollout.num_engines, or lower dataflow.max_staleness.",
                ("dataflow", "rollout.num_engines", "rollout.engine.max_num_seqs"),
                "warning",
            )
        )
    if config.algorithm.correction == "none" and flow.max_staleness > 0:
        findings.append(
            Finding(
                f"algorithm.correction=none with dataflow.max_staleness={flow.max_staleness}: stale tokens are trained as "
                "if they were on-policy, which biases the gradient. Use algorithm.correction=decoupled.",
                ("algorithm.correction", "dataflow.max_staleness"),
                "warning",
            )
        )
    if flow.batch_timeout_s <= rollout.request_timeout_s:
        findings.append(
            Finding(
                f"dataflow.batch_timeout_s={flow.batch_timeout_s:g} is not above rollout.request_timeout_s="
                f"{rollout.request_timeout_s:g}: the run would stop before a lost engine is noticed and its work retried. "
                f"Use more than {rollout.request_timeout_s:g}.",
                ("dataflow.batch_timeout_s", "rollout.request_timeout_s"),
                "warning",
            )
        )
    return findings


def check_pools(config: RunConfig) -> list[Finding]:
    """The pools that roles name must exist; the other cluster checks need them."""
    findings = []
    pools = list(config.cluster.pools)
    for key, name in (("trainer_pool", config.cluster.trainer_pool), ("rollout_pool", config.cluster.rollout_pool)):
        if name not in pools:
            close = get_close_matches(name, pools, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            findings.append(
                Finding(
                    f"cluster.{key}={name} is no pool.{hint} Pools: {', '.join(pools) or 'none'}.",
                    (f"cluster.{key}", "cluster.pools"),
                )
            )
    return findings


def check_run_dir_name(config: RunConfig) -> list[Finding]:
    """A run directory is a directory of its own."""
    if Path(config.run_dir).resolve() in (Path.cwd(), *Path.cwd().parents):
        return [
            Finding(
                f"run_dir={config.run_dir!r} is the working directory or above it: a run owns its directory, and "
                "overwrite=true would delete it. Use e.g. runs/${name}.",
                ("run_dir",),
            )
        ]
    return []


def _unequal_work(key: str, value: int, num_ranks: int) -> list[Finding]:
    if value % num_ranks == 0:
        return []
    below, above = value - value % num_ranks, value - value % num_ranks + num_ranks
    choices = f"{below} or {above}" if below else str(above)
    return [
        Finding(
            f"{key}={value} is not a multiple of trainer.num_ranks={num_ranks}: ranks would get unequal work. Use {choices}.",
            (key, "trainer.num_ranks"),
        )
    ]


_CHECKS: dict[Command, tuple[Check, ...]] = {
    "train": (
        check_run_dir_name, check_model, check_has_policy, check_batch, check_trainer, check_sampling, check_flow,
    ),
    "sft": (check_run_dir_name, check_model, check_sft_section, check_trainer),
    "eval": (check_model, check_has_policy, check_sampling),
}  # fmt: skip
