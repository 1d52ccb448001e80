"""What was forwarded before the batch was complete: used only if it is of the weights of the step, and then it changes
nothing but the work that is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.batch_builder import EarlyResults, Forwarded
from penstock.trainer.config import LoraConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from tests.tiers import each_of
from tests.unit.trainer.torch_trainer import scored, trainer_of

KINDS = {
    "critic": {"advantage": "gae"},
    "proximal": {"proximal": "recompute", "mini_batches": 3, "epochs": 2},
    "both": {"advantage": "gae", "proximal": "recompute", "mini_batches": 2, "epochs": 2, "overlong": "drop"},
    "reference below adapters": {"kl_coefficient": 0.1, "lora": LoraConfig(rank=3, alpha=5)},
    "pairs": {"loss": "online_dpo", "correction": "none", "lora": LoraConfig(rank=3, alpha=5)},
    "shared prompts": {"advantage": "gae", "proximal": "recompute", "share_prompts": True},
}
OF_THE_WORK = ("trainer/", "rank/")


def make(policy: str, kind: str, max_tokens: int = 60) -> PolicyTrainer:
    # ε of AdamW far above the gradient: updates are proportional to it, so that weights compare gradients.
    return trainer_of(policy, max_tokens, lr=0.1, adam_epsilon=1.0, **KINDS[kind])


def weights_of(trainer: PolicyTrainer) -> dict[str, np.ndarray]:
    named = {f"policy {name}": tensor for name, tensor in trainer.export_weights()}
    if trainer.critic is not None:
        named |= {f"critic {name}": tensor for name, tensor in trainer.critic.backend.export_weights()}
    return {name: tensor.detach().numpy().copy() for name, tensor in named.items()}


def assert_equal_training(mine: PolicyTrainer, plain: PolicyTrainer, reports) -> None:
    for name, weights in weights_of(plain).items():
        np.testing.assert_allclose(weights_of(mine)[name], weights, rtol=0, atol=1e-6, err_msg=name)
    with_it, without = reports
    assert (with_it.version, with_it.skipped) == (without.version, without.skipped)
    assert with_it.metrics.keys() == without.metrics.keys()
    for name, value in without.metrics.items():
        if not name.startswith(OF_THE_WORK):
            assert with_it.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def count_forwards(trainer: PolicyTrainer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Target tokens of every forward without gradient from now on."""
    seen: list[int] = []
    for backend in [trainer.backend, *([] if trainer.critic is None else [trainer.critic.backend])]:

        def forward(inputs, temperature, plain=backend.forward, model=backend._model):
            if not model.training:
                seen.append(len(inputs.target_ids))
            return plain(inputs, temperature)

        monkeypatch.setattr(backend, "forward", forward)
    return seen


@pytest.mark.some(2)
@pytest.mark.parametrize(("kind", "ahead"), each_of(KINDS, [(0, 1, 2), (2,), (1, 0), ()]))
def test_weights_and_metrics_are_those_without_early_logprobs(policy, batch, kind, ahead) -> None:
    mine, plain = make(policy, kind), make(policy, kind)
    for version in range(2):
        for index in ahead:
            mine.early_logprobs([batch[index]], version)
        reports = mine.step(batch, version), plain.step(batch, version)
        assert_equal_training(mine, plain, reports)
        tokens = [sum(one.num_sampled_tokens for one in group.trajectories) for group in batch]
        share = sum(tokens[index] for index in ahead) / sum(tokens)
        assert reports[0].metrics["trainer/early_logprobs_token_share"] == pytest.approx(share)
        assert (reports[0].metrics["trainer/early_logprobs_used_s"] > 0) == bool(ahead)
        assert reports[0].metrics["trainer/early_logprobs_unused_s"] == pytest.approx(0.0, abs=1e-9)
        assert (
            reports[0].busy_s
            >= reports[0].metrics["trainer/step_s"] + reports[0].metrics["trainer/early_logprobs_used_s"]
        )


@pytest.mark.parametrize("kind", ["critic", "proximal", "both", "reference below adapters"])
def test_a_step_whose_groups_are_all_forwarded_early_forwards_none_without_gradient(
    policy, batch, kind, monkeypatch
) -> None:
    trainer = make(policy, kind)
    seen = count_forwards(trainer, monkeypatch)
    trainer.early_logprobs(batch, 0)
    assert seen
    seen.clear()
    trainer.step(batch, 0)
    assert seen == []
    trainer.early_logprobs(batch[:2], 1)
    seen.clear()
    trainer.step(batch, 1)
    rest = [one.num_sampled_tokens for one in batch[2].trajectories]
    if kind == "both":  # the critic values whole groups, proximal logprobs are those of tokens that carry loss
        rest += [one.num_sampled_tokens for one in batch[2].trajectories if one.finish_reason != "length"]
    assert sum(seen) == sum(rest)


def spoil(trainer: PolicyTrainer) -> None:
    """What would train something else, if it were used."""
    for group_id, one in trainer._builder._early_results._kept.items():
        worse = {
            name: None if (found := getattr(one.payload, name)) is None else found + 5.0
            for name in ("values", "proximal", "reference")
        }
        trainer._builder._early_results._kept[group_id] = one._replace(payload=replace(one.payload, **worse))


@pytest.mark.parametrize("kind", ["critic", "proximal", "reference below adapters"])
def test_what_is_kept_is_what_a_step_uses(policy, batch, kind) -> None:
    """That the tests around this one could fail: spoilt numbers of the right version change the step."""
    mine, plain = make(policy, kind), make(policy, kind)
    mine.early_logprobs(batch, 0)
    spoil(mine)
    reports = mine.step(batch, 0), plain.step(batch, 0)
    with pytest.raises(AssertionError):
        assert_equal_training(mine, plain, reports)


@pytest.mark.parametrize("kind", ["critic", "proximal", "reference below adapters"])
def test_logprobs_of_another_version_are_computed_again(policy, batch, kind) -> None:
    mine, plain = make(policy, kind), make(policy, kind)
    mine.early_logprobs(batch, 3)
    spoil(mine)
    reports = mine.step(batch, 4), plain.step(batch, 4)
    assert_equal_training(mine, plain, reports)
    assert reports[0].metrics["trainer/early_logprobs_token_share"] == 0.0
    assert reports[0].metrics["trainer/early_logprobs_used_s"] == 0.0
    assert reports[0].metrics["trainer/early_logprobs_unused_s"] > 0


def test_nothing_outlives_a_step_that_was_skipped(policy, batch) -> None:
    """The policy's numbers are bad, so the version stays; the critic has moved all the same."""
    mine, plain = make(policy, "critic"), make(policy, "critic")
    bad = [GroupPayload(GroupId(9), batch[0].trajectories)]
    before = weights_of(mine)
    mine.early_logprobs(batch, 0)
    for trainer in (mine, plain):
        spoilt = [np.full_like(one.behavior_logprobs, np.nan) for one in bad[0].trajectories]
        pairs = zip(bad[0].trajectories, spoilt, strict=True)
        poisoned = [replace(one, behavior_logprobs=nan) for one, nan in pairs]
        report = trainer.step([GroupPayload(GroupId(9), tuple(poisoned))], 0)
        assert (report.skipped, report.version) == (True, 0)
    after = weights_of(mine)
    assert any(not np.array_equal(before[name], after[name]) for name in after if name.startswith("critic"))
    reports = mine.step(batch, 0), plain.step(batch, 0)
    assert reports[0].metrics["trainer/early_logprobs_token_share"] == 0.0
    assert_equal_training(mine, plain, reports)


def test_nor_other_updates_of_the_weights(policy, batch) -> None:
    mine, plain = make(policy, "proximal"), make(policy, "proximal")
    mine.early_logprobs(batch, 0)
    for trainer in (mine, plain):
        trainer.supervised_step([([2, 3], [4, 5, 1])])
    reports = mine.step(batch, 0), plain.step(batch, 0)
    assert reports[0].metrics["trainer/early_logprobs_token_share"] == 0.0
    assert_equal_training(mine, plain, reports)


def test_of_a_trimmed_group_only_the_tokens_with_loss_are_used(policy, batch) -> None:
    mine, plain = make(policy, "both"), make(policy, "both")
    mine.early_logprobs(batch[:2], 5)
    trimmed = scored(batch, min_versions=[0, 3, 0])
    reports = mine.step(trimmed, 5), plain.step(trimmed, 5)
    assert_equal_training(mine, plain, reports)


def test_a_trainer_that_needs_none_of_it_does_nothing(policy, batch, monkeypatch) -> None:
    trainer = trainer_of(policy)
    seen = count_forwards(trainer, monkeypatch)
    trainer.early_logprobs(batch, 0)
    assert seen == []
    assert not any("early_logprobs" in name for name in trainer.step(batch, 0).metrics)


def test_a_group_that_has_its_reference_gets_no_other(policy, batch) -> None:
    trainer = make(policy, "reference below adapters")
    given = np.zeros(1, np.float32)
    trainer.early_logprobs(scored(batch[:1], references=[given]), 0)
    (kept,) = trainer._builder._early_results._kept.values()
    assert kept.payload.reference is given


def test_accounts_are_of_one_step(batch) -> None:
    results = EarlyResults()
    ahead = [replace(group, values=np.zeros(1, np.float32)) for group in batch]
    for group, seconds, version in zip(ahead, (1.0, 2.0, 4.0), (7, 6, 7), strict=True):
        results.keep(Forwarded(version, seconds, group))
    assert [one.values is not None for one in results.of(batch[:2], 7)] == [True, False]
    metrics, seconds = results.forget()
    tokens = [sum(one.num_sampled_tokens for one in group.trajectories) for group in batch]
    assert metrics == {
        "trainer/early_logprobs_token_share": tokens[0] / (tokens[0] + tokens[1]),
        "trainer/early_logprobs_used_s": 1.0,
        "trainer/early_logprobs_unused_s": 6.0,
    }
    assert seconds == 7.0
    assert results.forget() == (dict.fromkeys(metrics, 0.0), 0.0)
    assert [one.values for one in results.of(batch, 7)] == [None] * 3
