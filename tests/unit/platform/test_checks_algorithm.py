"""Combinations of the algorithm with other sections that are refused or cause a warning before anything starts."""

from __future__ import annotations

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config, load_config
from penstock.platform.config.overrides import CONF_DIR

PRESETS = sorted(path.stem for path in (CONF_DIR / "algorithm").glob("*.yaml"))
OWN = "tests.unit.trainer.algorithms.own"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        compose_config(["experiment=arithmetic", *overrides])
    return raised.value.violations


def warnings(*overrides: str) -> list[str]:
    config = compose_config(["experiment=arithmetic", *overrides])
    return [finding.message for finding in check_config(config, "train") if finding.severity == "warning"]


def preset_overrides(preset: str) -> list[str]:
    """Overrides that choose a preset."""
    return [f"algorithm={preset}", *(["teacher.path=somewhere"] if preset == "distill" else [])]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_without_a_warning(preset):
    dynamic_sampling = ["dataflow.filters.zero_variance=true"] if preset == "dapo" else []
    assert warnings(*preset_overrides(preset), *dynamic_sampling) == []


def test_a_filter_of_groups_that_a_teacher_would_train_is_a_warning():
    taught = ["algorithm.teacher_coefficient=0.1", "teacher.path=somewhere"]
    assert warnings(*taught) == []
    (warning,) = warnings(*taught, "dataflow.filters.zero_variance=true")
    assert "drops groups of equal rewards, which the teacher would train too" in warning


def test_dapo_without_dynamic_sampling_is_a_warning():
    (warning,) = warnings("algorithm=dapo")
    assert "DAPO without its dynamic sampling" in warning
    assert "Use dataflow.filters.zero_variance=true" in warning
    assert warnings("algorithm=dapo", "dataflow.filters.pass_rate=[0.1,0.9]") == [], "drops such groups as well"
    assert len(warnings("algorithm=dapo", "dataflow.filters.pass_rate=[0.1,1.0]")) == 1


def test_the_warning_of_dapo_is_printed_by_a_dry_run_and_goes_with_the_run():
    loaded = load_config("train", ["experiment=arithmetic", "algorithm=dapo"], dry_run=True)
    assert any("DAPO without its dynamic sampling" in warning for warning in loaded.warnings)


def test_presets_that_need_a_frozen_policy_start_one():
    configs = {one: compose_config(["experiment=arithmetic", *preset_overrides(one)]) for one in PRESETS}
    assert {one for one in PRESETS if configs[one].num_frozen("reference")} == {"online_dpo"}
    assert {one for one in PRESETS if configs[one].num_frozen("teacher")} == {"distill"}
    assert compose_config(["experiment=arithmetic", "algorithm.kl.coefficient=0.1"]).num_frozen("reference") == 1
    in_reward = ["algorithm.kl.coefficient=0.1", "algorithm.kl.apply_to=reward", "algorithm.kl.estimator=k1"]
    assert compose_config(["experiment=arithmetic", *in_reward]).num_frozen("reference") == 1


CONTEXT = "model.max_context_tokens=128"
SIZES = (CONTEXT, "dataflow.group_size=8")
SEQUENCE_PARALLEL = ["trainer.sequence_parallel_size=2", "trainer.num_ranks=2", "model.attention=varlen"]


@pytest.mark.some(20)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=reinforce_pp", "dataflow.stream_micro_batches=true"], "whitens over all tokens"),
        (["algorithm.nll_coefficient=0.1", "dataflow.stream_micro_batches=true"], "the answers of the batch that pass"),
        (["algorithm=gspo", "dataflow.on_expiry=trim"], "algorithm.loss=gspo"),
        (["algorithm=topr", "dataflow.on_expiry=trim"], "its newer part only"),
        (["algorithm=online_dpo", "dataflow.on_expiry=trim"], "algorithm.loss=online_dpo"),
        (
            ["algorithm/correction=[tis_seq]", "algorithm.aggregation=seq_mean_token_sum", "dataflow.on_expiry=trim"],
            "algorithm.correction=tis_seq",
        ),
        (["algorithm=gspo", *SEQUENCE_PARALLEL], "algorithm.loss=gspo with trainer.sequence_parallel_size=2"),
        (["algorithm/correction=[decoupled,opsm]", *SEQUENCE_PARALLEL], "algorithm.correction=opsm"),
        (["algorithm.entropy_top_share=0.2", *SEQUENCE_PARALLEL], "algorithm.entropy_top_share=0.2"),
        (
            ["algorithm/loss=custom", f"algorithm.loss.function={OWN}:squared", *SEQUENCE_PARALLEL],
            f"algorithm.loss={OWN}:squared with trainer",
        ),
        (
            ["algorithm=online_dpo", "algorithm/loss=custom", f"algorithm.loss.function={OWN}:pairs_of_nothing"],
            "Let them be a subclass of PairsConfig",
        ),
        (["algorithm/loss=reinforce", "algorithm.proximal=behavior", "algorithm/correction=none"], "has no ρ"),
        (
            ["algorithm=online_dpo", "trainer.max_tokens_per_micro_batch=200", CONTEXT],
            "below 2 x model.max_context_tokens=128",
        ),
        (
            ["algorithm=online_dpo", "algorithm.loss.pairs=all", "trainer.max_tokens_per_micro_batch=512", *SIZES],
            "Use at least 1024",
        ),
        (["algorithm.overlong.mode=penalty", "algorithm.overlong.ramp_share=1.5"], "must be in (0, 1]"),
        (["algorithm=dapo", "dataflow.length_limiting=by_success"], "answers that a lower limit cuts off would have"),
        (
            ["algorithm.correction.renormalize=kept", "model.dtype=bfloat16"],
            "plain bfloat16 optimizer does not support",
        ),
        (
            ["algorithm.correction.renormalize=kept", "model.dtype=bfloat16", "trainer.zero_stage=1"],
            "with trainer.zero_stage=1 in model.dtype=bfloat16",
        ),
        (
            ["dataflow.stream_micro_batches=true", "model.dtype=bfloat16", "trainer.zero_stage=1"],
            "with trainer.zero_stage=1 in model.dtype=bfloat16",
        ),
        (["algorithm/loss=gspoo"], "Did you mean gspo?"),
        (["algorithm/correction=[decoupled,tis_tokens]"], "Did you mean tis_token?"),
        (["algorithm/advantage=greppo"], "Did you mean grpo?"),
        (["algorithm.kl.apply_to=rewards"], "Choices: loss, reward"),
        (["algorithm/loss=custom", f"algorithm.loss.function={OWN}:squard"], "Did you mean 'squared'?"),
        (["algorithm/advantage=custom", f"algorithm.advantage.function={OWN}:NOT_A_FUNCTION"], "is not callable"),
        (["algorithm.loss=dppo"], "Write algorithm=dppo."),
        (["algorithm.loss.type=dppo"], "settings of the previous variant. Write algorithm=dppo."),
        (["algorithm.loss=own:f"], "Write algorithm/loss=custom algorithm.loss.function=own:f."),
        (["algorithm.loss.type=dpo"], "Did you mean dppo?"),
        (["algorithm/loss=custom"], "algorithm.loss.function is required"),
        (["algorithm.overlong=mask"], "must be a section with keys of its own"),
        (
            ["algorithm/loss=dppo", "algorithm/correction=none", "algorithm.loss.clip_low=0.1"],
            "cispo, clip_cov, gmpo, gspo or gspo_token; the chosen one is dppo. Choose",
        ),
        (["critic.path=somewhere"], "which has no critic"),
        (["critic.updates_per_policy_update=2"], "has no critic, so nothing would be updated"),
        (["algorithm=ppo", "critic.updates_per_policy_update=0.004"], "would never be updated. Use at least 0.005."),
        (["algorithm=distill"], "teacher.path is not set"),
        (["teacher.path=somewhere"], "which uses no teacher"),
        (["algorithm=distill", "teacher.path=x", "dataflow.filters.zero_variance=true"], "groups of equal rewards"),
        (["algorithm=distill", "teacher.path=x", "teacher.pool=cpus"], "Did you mean cpu?"),
        (["algorithm=ppo", "algorithm.epochs=1", "dataflow.stream_micro_batches=true"], "trained on whole batches"),
        (["algorithm=ppo", "trainer.tensor_parallel_size=2", "trainer.num_ranks=2"], "a second engine in that process"),
        (
            ["algorithm.proximal=recompute", "algorithm.mini_batches=3", "dataflow.batch_groups=32"],
            "mini_batches=3 does not divide",
        ),
        (
            ["algorithm.proximal=recompute", "algorithm.epochs=2", "dataflow.stream_micro_batches=true"],
            "mini-batches are drawn from the whole batch",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_one_reason(overrides, words):
    (problem,) = problems(*overrides)
    assert words in problem


def test_reasons_come_all_at_once():
    found = problems("algorithm/correction=[decoupled,tis_seq]", "critic.path=x", "algorithm/loss=dppo")
    assert len(found) == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm/correction=none"], "biases the gradient"),
        (["algorithm/correction=[mis_seq_geo]"], "biases the gradient"),
        (["algorithm=dr_grpo", "algorithm.aggregation=token_mean"], "Use aggregation=constant_length"),
        (["algorithm.kl.estimator=k3"], "has no effect"),
        (["algorithm/loss=sft", "algorithm/correction=none"], "rewards have no effect"),
        (["algorithm.proximal=recompute"], "costs one more forward pass"),
    ],
)
def test_what_is_biased_or_without_effect_is_a_warning(overrides, words):
    (warning,) = warnings(*overrides)
    assert words in warning


def test_returns_that_are_not_whitened_may_be_streamed():
    streamed = ["algorithm=reinforce_pp", "dataflow.stream_micro_batches=true"]
    assert (
        compose_config(
            ["experiment=arithmetic", *streamed, "algorithm.advantage.whiten=none"]
        ).algorithm.advantage.whiten
        == "none"
    )


def test_the_preset_ppo_whitens():
    assert compose_config(["experiment=arithmetic", "algorithm=ppo"]).algorithm.advantage.whiten == "batch"


def test_synchronous_data_needs_no_correction():
    assert warnings("algorithm/correction=none", "dataflow=synchronous") == []


def test_a_users_own_loss_is_accepted():
    config = compose_config(
        ["experiment=arithmetic", "algorithm/loss=custom", f"algorithm.loss.function={OWN}:squared"]
    )
    assert config.algorithm.loss.name == f"{OWN}:squared"


def test_a_warm_up_of_the_critic_that_leaves_no_batch_for_the_policy_is_refused():
    (problem,) = problems("algorithm=ppo", "critic.warmup_steps=100")
    assert problem.startswith("critic.warmup_steps=100 with total_steps=100: only the critic would be trained")
    compose_config(["experiment=arithmetic", "algorithm=ppo", "critic.warmup_steps=99"])
