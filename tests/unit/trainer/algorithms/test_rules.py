"""The catalog resolves, and combinations that cannot work are refused with a reason, all at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.trainer.algorithms.catalog import KINDS, entries, find
from penstock.trainer.algorithms.rules import algorithm_violations
from penstock.trainer.config import AlgorithmConfig
from tests.algorithms import algorithm_config
from tests.unit.trainer.torch_trainer import trainer_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_entry_has_a_formula_and_a_function_with_a_docstring_where_it_says(entry) -> None:
    function = entry.load()
    assert function.__doc__
    assert entry.formula
    assert f"\ndef {function.__name__}(" in (ROOT / entry.file).read_text(encoding="utf-8")
    assert entry.kind in KINDS


def test_names_are_unique_within_a_kind() -> None:
    assert len({(entry.kind, entry.name) for entry in entries()}) == len(entries())


SOUND = [
    {},
    {"correction": ["tis_token", "mis_seq_geo", "opsm", "veto"]},
    {"correction": "none", "proximal": "behavior"},
    {"correction": ["opsm"], "proximal": "behavior"},
    {"loss": "gspo", "correction": ["tis_seq"], "aggregation": "seq_mean_token_mean"},
    {"loss": "gspo", "correction": ["mis_seq_geo"], "aggregation": "seq_mean_token_mean"},
    {"loss": "gspo_token", "correction": ["tis_token"], "aggregation": "seq_mean_token_mean"},
    {"loss": "topr", "correction": ["veto"], "aggregation": "constant_length"},
    {"loss": "online_dpo", "correction": "none"},
    {"loss": "distill", "correction": ["decoupled", "veto"]},
    {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "advantage": "reinforce_pp"},
    {"kl_coefficient": 0.0, "kl_estimator": "k1"},
    {"reward_weights": {"a": 1.0}},
    {"renormalize": "kept", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"proximal": "recompute", "mini_batches": 2},
    {"proximal": "interpolate", "epochs": 2, "correction": ["tis_token"]},
    {"loss": "reinforce", "mini_batches": 4},
    {"loss": "clip_cov", "proximal": "recompute", "correction": ["tis_token", "m2po"]},
    {"loss": "gmpo", "proximal": "behavior", "correction": "none", "aggregation": "seq_mean_token_mean"},
    {"advantage": "maxrl", "aggregation": "prompt_mean", "teacher_coefficient": 0.5, "nll_coefficient": 0.1},
    {"advantage": "gae", "epochs": 2, "proximal": "recompute"},
    {"loss": "my_pkg.my_loss", "advantage": "my_pkg:my_advantage"},
]
UNSOUND = [
    ({"loss": "distill", "advantage": "rloo"}, "the teacher's logprobs replace it"),
    ({"loss": "distill", "correction": ["tis_token", "opsm"]}, "masks answers of negative advantage"),
    ({"loss": "distill", "proximal": "behavior", "correction": "none"}, "has no ρ"),
    ({"mini_batches": 2}, "mini_batches=2 x epochs=1"),
    (
        {"loss": "gmpo", "aggregation": "seq_mean_token_mean", "proximal": "recompute", "correction": ["m2po"]},
        "m2po masks single tokens",
    ),
    ({"epochs": 3, "loss": "sapo"}, "clips do nothing"),
    ({"correction": ["decoupled", "tis_token"]}, "2 weights, decoupled and tis_token"),
    ({"proximal": "behavior"}, "twice: ρ = exp"),
    ({"proximal": "behavior", "correction": ["mis_seq_geo"]}, "never acts"),
    ({"proximal": "behavior", "correction": ["veto"]}, "never acts"),
    ({"loss": "dppo"}, "looks at the behavior policy itself"),
    ({"loss": "topr", "aggregation": "seq_mean_token_sum"}, "looks at the behavior policy itself"),
    ({"loss": "topr", "correction": "none"}, "aggregation=token_mean with algorithm.loss=topr"),
    ({"loss": "sft"}, "has no ratio to correct"),
    ({"loss": "online_dpo"}, "two halves of a pair"),
    ({"loss": "ipo", "correction": ["opsm"]}, "two halves of a pair"),
    ({"loss": "ipo", "correction": "none", "kl_coefficient": 0.1}, "the pair's own β"),
    ({"loss": "ipo", "correction": "none", "advantage": "gae"}, "it compares the rewards of a pair"),
    ({"loss": "ipo", "correction": "none", "entropy_coefficient": 0.1}, "this loss a mean over pairs"),
    ({"entropy_target": 0.3, "renormalize": "kept"}, "masks leave the entropy bonus alone"),
    ({"entropy_target": 0.3, "entropy_coefficient": 0.1}, "0.1 is above max_coefficient=0.005"),
    ({"advantage": "gae", "bootstrap": True, "overlong": "penalty"}, "treats the length limit as no end"),
    ({"loss": "online_dpo", "correction": "none", "aggregation": "constant_length"}, "the mean over the pairs"),
    ({"loss": "online_dpo", "correction": "none", "proximal": "recompute", "epochs": 2}, "so there is no ratio"),
    ({"loss": "gspo", "aggregation": "seq_mean_token_mean"}, "one term per sequence: it would get the mean weight"),
    ({"loss": "gspo", "correction": "none"}, "would count by its length"),
    ({"loss": "gspo", "correction": "none", "aggregation": "seq_mean_token_sum"}, "would count by its length"),
    ({"loss": "gspo_token", "correction": "none"}, "sequence, so the average must be over sequences"),
    ({"correction": ["tis_seq"]}, "algorithm.correction=tis_seq"),
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "zero mean"),
    ({"kl_coefficient": 0.1, "kl_in": "reward"}, "only k1 gives"),
    ({"kl_coefficient": 0.1, "renormalize": "kept"}, "the coefficient would grow"),
    ({"nll_coefficient": 0.1, "renormalize": "weights"}, "no correction weighs the logprobs"),
    ({"loss": "clip_cov"}, "Use proximal=recompute"),
    ({"loss": "kl_cov", "epochs": 2, "proximal": "interpolate"}, "algorithm.loss=kl_cov: it compares all tokens"),
    ({"loss": "clip_cov", "proximal": "recompute", "min_covariance": 5.0}, "is not below max_covariance=5"),
    ({"correction": ["decoupled", "m2po"]}, "algorithm.correction=m2po: it compares all tokens"),
    ({"loss": "gmpo", "correction": "none"}, "algorithm.loss=gmpo: every token gets the one term"),
    ({"loss": "gmpo", "aggregation": "seq_mean_token_mean"}, "algorithm.loss=gmpo has one term per sequence"),
    ({"loss": "topr", "correction": "none", "aggregation": "prompt_mean"}, "average must be over sequences"),
    ({"advantage": "maxrl", "overlong": "penalty"}, "makes rewards negative"),
    ({"advantage": "maxrl", "kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"}, "makes rewards negative"),
    ({"loss": "distill", "teacher_coefficient": 0.5}, "added to the advantage, and this loss uses none"),
    ({"loss": "ipo", "correction": "none", "teacher_coefficient": 0.5}, "added to the advantage"),
    ({"reward_weights": {"a": 1.0}, "advantage": "reinforce_pp"}, "algorithm.advantage=reinforce_pp"),
    ({"reward_weights": {"a": 1.0}, "overlong": "penalty"}, "algorithm.overlong.mode=penalty"),
    ({"loss": "ipo", "correction": "none", "staleness_decay": 0.9}, "staleness_decay=0.9"),
    (
        {"loss": "gspo", "correction": "none", "aggregation": "seq_mean_token_mean", "entropy_top_share": 0.2},
        "entropy_top_share=0.2",
    ),
]


@pytest.mark.parametrize("settings", SOUND, ids=str)
def test_sound_combinations_pass(settings: dict) -> None:
    assert algorithm_violations(algorithm_config(**settings)) == []


@pytest.mark.parametrize(("settings", "words"), UNSOUND, ids=str)
def test_unsound_ones_are_refused_with_the_reason(settings: dict, words: str) -> None:
    (violation,) = algorithm_violations(algorithm_config(**settings))
    assert words in violation
    assert violation.startswith("algorithm.")
    assert violation.endswith(".")
    named = re.findall(r"algorithm\.(\w+)", violation)
    assert named
    assert set(named) <= set(AlgorithmConfig.model_fields)


def test_all_reasons_come_at_once_and_a_trainer_is_not_built(policy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        trainer_of(policy, loss="gspo", correction=["decoupled", "tis_seq"], epochs=2)
    assert len(raised.value.violations) == 5


def test_what_is_named_by_path_counts_as_the_users_own() -> None:
    assert find("loss", "pkg.mod:fn").is_own
    assert not find("loss", "gspo").is_own
