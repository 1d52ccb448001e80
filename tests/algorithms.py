"""Algorithms by flat settings: tests that draw combinations name each setting once, whichever variant reads it.

A setting that the chosen variants do not have is left out, as a random draw of all settings needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from penstock.trainer import config as variants
from penstock.trainer.algorithms.advantages import OverlongConfig
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.catalog import Custom, Named, is_import_path
from penstock.trainer.algorithms.controllers import EntropyConfig
from penstock.trainer.algorithms.corrections import CorrectionConfig
from penstock.trainer.algorithms.kl import KlConfig
from penstock.trainer.config import AlgorithmConfig

LOSS = {
    "dual_clip": {"max_ratio": "dual_clip"},
    "cispo": {"clip_low": "cispo_low"},
    "sapo": {"tau_positive": "sapo_tau_positive", "tau_negative": "sapo_tau_negative"},
    "dppo": {"delta": "dppo_delta", "max_weight": "dppo_cap"},
    "online_dpo": {"margin": "pair_margin", "beta": "pair_beta", "length": "dpo_length"},
    "ipo": {"margin": "pair_margin", "beta": "pair_beta", "length": "ipo_length"},
    "gmpo": {"clip_low": "gmpo_low", "clip_high": "gmpo_high"},
    "clip_cov": {"share": "clip_cov_share"},
    "kl_cov": {"share": "kl_cov_share", "coefficient": "kl_cov_coefficient"},
}
ADVANTAGE = {"std": "advantage_std", "epsilon": "std_epsilon", "gamma": "gae_gamma", "lam": "gae_lambda"}
CORRECTION = {
    "decoupled": {"max_weight": "correction_cap"},
    "tis_token": {"min_weight": "tis_low", "max_weight": "tis_cap"},
    "tis_seq": {"min_weight": "tis_low", "max_weight": "tis_cap"},
    "mis_token": {"min_weight": "mis_low", "max_weight": "mis_high"},
    "f_tis": {"max_weight": "tis_cap", "max_kl": "f_tis_max_kl"},
    "mis_seq_geo": {"min_weight": "geo_low", "max_weight": "geo_high"},
    "opsm": {"delta": "opsm_delta"},
    "veto": {"min_weight": "veto_min"},
    "m2po": {"max_second_moment": "m2po_moment"},
}
PLAIN = (
    "reward_weights", "proximal", "mini_batches", "epochs", "aggregation", "teacher_coefficient", "nll_coefficient",
    "staleness_decay", "entropy_top_share",
)  # fmt: skip


def resolved(**flat: Any) -> Algorithm:
    """As a trainer has it."""
    return Algorithm(algorithm_config(**flat))


def chosen(union: Any, name: str, flat_names: dict[str, str], flat: dict[str, Any]) -> Named | Custom:
    """The variant of that name, with what of `flat` it has."""
    if is_import_path(name):
        return Custom(function=name)
    members = (one for one in get_args(get_args(union)[0]) if one is not Custom)
    variant = next(one for one in members if name in get_args(one.model_fields["type"].annotation))
    fields = {field: flat_names.get(field, field) for field in variant.model_fields if field != "type"}
    return variant(type=name, **{field: flat[key] for field, key in fields.items() if key in flat})


def loss_config(name: str, **flat: Any) -> Any:
    """Settings of a loss."""
    return chosen(variants.LossConfig, name, LOSS.get(name, {}), flat)


def advantage_config(name: str, **flat: Any) -> Any:
    """Settings of an estimator."""
    return chosen(variants.AdvantageConfig, name, ADVANTAGE, flat)


def correction_config(names: str | Sequence[str], **flat: Any) -> CorrectionConfig:
    """A chain; `none` is an empty one."""
    chain = [names] if isinstance(names, str) else names
    sections = {
        name: {field: flat[key] for field, key in CORRECTION[name].items() if key in flat}
        for name in chain
        if name != "none"
    }
    return CorrectionConfig.model_validate(sections | {"renormalize": flat.get("renormalize", "none")})


def algorithm_config(**flat: Any) -> AlgorithmConfig:
    """The whole section."""
    kl = {
        "coefficient": "kl_coefficient",
        "apply_to": "kl_in",
        "estimator": "kl_estimator",
        "max_weight": "kl_max_weight",
        "target": "kl_target",
        "gain": "kl_gain",
    }
    entropy = {
        "coefficient": "entropy_coefficient",
        "target": "entropy_target",
        "step": "entropy_step",
        "max_coefficient": "entropy_max_coefficient",
    }
    overlong = {"mode": "overlong", "ramp_share": "overlong_ramp_share"}
    return AlgorithmConfig(
        advantage=advantage_config(flat.get("advantage", "grpo"), **flat),
        loss=loss_config(flat.get("loss", "ppo_clip"), **flat),
        correction=correction_config(flat.get("correction", "decoupled"), **flat),
        kl=KlConfig(**{field: flat[key] for field, key in kl.items() if key in flat}),
        entropy=EntropyConfig(**{field: flat[key] for field, key in entropy.items() if key in flat}),
        overlong=OverlongConfig(**{field: flat[key] for field, key in overlong.items() if key in flat}),
        **{key: flat[key] for key in PLAIN if key in flat},
    )
