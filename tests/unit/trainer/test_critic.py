"""PPO with a critic, against a loop over single unpacked sequences in plain torch and float64 sums."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError, StepEndedError, TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.build import build_trainer
from penstock.trainer.checkpoint import write_snapshot
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.trainer.models.critic import Pace
from penstock.trainer.models.value_model import load_value_model
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from tests.algorithms import algorithm_config
from tests.unit.trainer.torch_trainer import MODEL, trainer_of

# ε of AdamW far above the gradient: updates are proportional to it, so that weights compare gradients.
PPO = {
    "advantage": "gae", "gae_gamma": 0.9, "gae_lambda": 0.8, "correction": "none", "value_clip": 0.05,
    "proximal": "recompute", "epochs": 3, "lr": 1.0, "adam_epsilon": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def judge(policy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with a head that says something."""
    model = load_value_model(policy, MODEL, gradient_checkpointing=False).classifier
    torch.manual_seed(5)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    path = str(tmp_path_factory.mktemp("judge"))
    model.save_pretrained(path)
    return path


def values_of(model, one) -> torch.Tensor:
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return model.score(hidden)[np.flatnonzero(one.loss_mask) - 1, 0]


def advantages_of(values: np.ndarray, reward: float) -> np.ndarray:
    """`A_t = Σ_k (γλ)^k δ_{t+k}`, term by term."""
    rewards = np.append(np.zeros(len(values) - 1), reward)
    deltas = rewards + 0.9 * np.append(values[1:], 0.0) - values
    return np.array([sum((0.9 * 0.8) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(values))])


def oracle(judge: str, batch: list[GroupPayload]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The critic's weights after three updates over the whole batch, and its metrics."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    members = [one for group in batch for one in group.trajectories]
    with torch.no_grad():
        old = [values_of(model, one) for one in members]
    returns = [
        torch.tensor(advantages_of(v.double().numpy(), one.reward)) + v for v, one in zip(old, members, strict=True)
    ]
    total, losses, clipped = sum(map(len, old)), [], 0
    for _ in range(3):
        losses.append(0.0)
        for one, before, wanted in zip(members, old, returns, strict=True):
            value = values_of(model, one)
            free = (value - wanted) ** 2
            bound = (torch.minimum(torch.maximum(value, before - 0.05), before + 0.05) - wanted) ** 2
            loss = 0.5 * torch.maximum(free, bound).sum() / total
            clipped += int((bound > free).sum())
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    v, ret = torch.cat(old).double(), torch.cat(returns)
    facts = {
        "critic/loss": np.mean(losses),
        "critic/clip_share": clipped / (3 * total),
        "critic/mean_value": float(v.mean()),
        "critic/mean_return": float(ret.mean()),
        "critic/explained_variance": 1 - float((ret - v).var(correction=0) / ret.var(correction=0)),
    }
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, facts


def ppo_trainer(policy: str, judge: str | None, max_tokens: int):
    return trainer_of(policy, max_tokens, critic_path=judge, **PPO)


@pytest.mark.parametrize("max_tokens", [40, 1000])
def test_critic_and_advantages_equal_a_plain_loop(policy, judge, batch, max_tokens) -> None:
    trainer = ppo_trainer(policy, judge, max_tokens)
    before = {name: tensor.clone() for name, tensor in trainer.critic.backend.export_weights()}
    report = trainer.step(batch, 0)
    expected, facts = oracle(judge, batch)
    after = dict(trainer.critic.backend.export_weights())
    assert after.keys() == expected.keys()
    moved = sum(float((expected[name] - old).square().sum()) for name, old in before.items())
    error = sum(float((after[name] - expected[name]).square().sum()) for name in after)
    assert error**0.5 < 1e-4 * moved**0.5
    assert {name: report.metrics[name] for name in facts} == pytest.approx(facts, rel=1e-4)
    assert 0 < facts["critic/clip_share"] < 1
    assert report.metrics["critic/skipped_updates"] == 0


def test_the_policy_is_trained_with_the_critics_advantages(policy, judge, batch) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    trainer = ppo_trainer(policy, judge, 60)
    sequences = trainer._builder.build(batch, 0)
    members = [one for group in batch for one in group.trajectories]
    with torch.no_grad():
        values = [values_of(model, one).double().numpy() for one in members]
    raw = [advantages_of(value, one.reward) for value, one in zip(values, members, strict=True)]
    mean, deviation = np.concatenate(raw).mean(), np.concatenate(raw).std(ddof=1)
    for sequence, value, advantage in zip(sequences, values, raw, strict=True):
        np.testing.assert_allclose(sequence.advantages, (advantage - mean) / (deviation + 1e-4), atol=1e-4)
        np.testing.assert_allclose(sequence.returns, advantage + value, atol=1e-5)


def test_a_new_critic_predicts_0_and_learns_the_returns(policy, batch) -> None:
    settings = PPO | {"gae_gamma": 1.0, "gae_lambda": 1.0, "lr": 3e-3, "adam_epsilon": 1e-8, "value_clip": 1.0}
    trainer = trainer_of(policy, 100, **settings)
    metrics = [trainer.step(batch, version).metrics for version in range(12)]
    assert metrics[0]["critic/mean_value"] == 0.0
    assert metrics[0]["critic/explained_variance"] == 0.0
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1]["critic/loss"] < 0.3 * metrics[0]["critic/loss"]


def test_a_batch_that_is_not_finite_changes_neither_of_them(policy, judge, batch) -> None:
    trainer = ppo_trainer(policy, judge, 60)
    with torch.no_grad():
        trainer.critic.backend._model.classifier.score.weight[0, 0] = np.nan
    report = trainer.step(batch, 4)
    assert (report.skipped, report.version) == (True, 4)
    assert report.metrics["critic/skipped_updates"] == 3


def test_a_critic_is_needed_and_wants_whole_batches(policy, judge, batch) -> None:
    with pytest.raises(TrainingError, match="advantage=gae has a critic"):
        trainer_of(policy, **(PPO | {"epochs": 1})).accumulate(batch[:1], 0)
    trainer = TrainerConfig(backend="torch", max_tokens_per_micro_batch=60, optimizer=OptimizerConfig(lr=1e-3))
    with pytest.raises(ConfigError, match="needs a critic"):
        build_trainer(
            TrainerSpec(
                model_path=policy, model=MODEL, trainer=trainer, algorithm=algorithm_config(advantage="gae"),
                device="cpu", threads=1, seed=0, temperature=1.0, max_new_tokens=8,
            )
        )  # fmt: skip


def test_a_warm_up_trains_the_critic_alone_and_the_policy_from_the_batch_after(policy, judge, batch) -> None:
    adaptive = {"entropy_target": 9.0, "entropy_step": 0.001}
    trainer = trainer_of(policy, critic_path=judge, critic_warmup=2, warmup_steps=3, **PPO, **adaptive)
    policies, critics, silent, rates, bonuses = [], [], [], [], []
    for version in range(4):
        policies.append(torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()]))
        critics.append(torch.cat([tensor.flatten().clone() for _, tensor in trainer.critic.backend.export_weights()]))
        report = trainer.step(batch, version)
        assert report.version == version + 1
        silent.append(report.metrics["trainer/silent_updates"])
        rates.append(report.metrics["loss/lr"])
        bonuses.append(report.metrics["loss/entropy_coefficient"])
    assert bonuses == pytest.approx([0.0, 0.0, 0.0, 0.001]), "the coefficient waits for the policy"
    assert torch.equal(policies[0], policies[1])
    assert torch.equal(policies[1], policies[2])
    assert not torch.equal(policies[2], policies[3])
    assert not any(torch.equal(one, other) for one, other in pairwise(critics))
    assert silent == [3, 3, 0, 0], "three epochs, each one update"
    assert rates == pytest.approx([1 / 3, 1 / 3, 1.0, 1.0]), "the policy's own warm-up begins after that of the critic"


def test_a_restored_run_is_still_in_its_warm_up(policy, judge, batch, tmp_path) -> None:
    trainer = trainer_of(policy, critic_path=judge, critic_warmup=2, **PPO)
    trainer.step(batch, 0)
    write_snapshot(trainer.snapshot(1), tmp_path, 0)
    restored = trainer_of(policy, critic_path=judge, critic_warmup=2, **PPO)
    version = restored.restore(str(tmp_path))
    assert [restored.step(batch, one).metrics["trainer/silent_updates"] for one in (version, version + 1)] == [3, 0]


@pytest.mark.parametrize("max_tokens", [40, 1000])
def test_the_return_of_a_cut_answer_has_the_value_of_the_state_at_the_cut(policy, judge, batch, max_tokens) -> None:
    """arXiv 1712.00378: δ_T = r_T + γ V(s_{T+1}) − V(s_T), and V(s_{T+1}) = 0 only if the answer has ended itself."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    sequences = {
        bootstrap: trainer_of(policy, max_tokens, critic_path=judge, bootstrap=bootstrap, **PPO)._builder.build(
            batch, 0
        )
        for bootstrap in (False, True)
    }
    members = [one for group in batch for one in group.trajectories]
    num_cut = 0
    for member, plain, with_value in zip(members, sequences[False], sequences[True], strict=True):
        ids = torch.tensor(member.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            state = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            at_cut = float(model.score(state)[0])
        is_cut = member.finish_reason == "length"
        num_cut += is_cut
        # The value reaches every token before with (γλ)^distance · γ.
        distances = np.arange(len(plain.returns))[::-1]
        added = (0.9 * 0.8) ** distances * 0.9 * at_cut if is_cut else np.zeros(len(distances))
        np.testing.assert_allclose(with_value.returns - plain.returns, added, atol=1e-5)
    assert num_cut == 2


def test_values_at_cuts_that_were_computed_early_are_used(policy, judge, batch) -> None:
    options = PPO | {"bootstrap": True}
    trainer, other = (trainer_of(policy, critic_path=judge, **options) for _ in range(2))
    trainer.early_logprobs(batch[:2], 0)
    mine, theirs = (one._builder.build(batch, 0) for one in (trainer, other))
    for one, same in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one.returns, same.returns, atol=1e-5)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 2.5, 0.5, 0.3, 1 / 3, 7.77])
def test_a_pace_keeps_its_ratio_over_2000_updates_and_goes_on_where_it_was_saved(ratio: float) -> None:
    pace, resumed, of_each = Pace(ratio), Pace(ratio), []
    for number in range(2000):
        of_each.append(pace.num_next)
        assert resumed.num_next == pace.num_next
        pace, resumed = pace.after(pace.num_next), resumed.after(resumed.num_next)
        if number % 7 == 0:  # as the metadata of a checkpoint holds it
            resumed = Pace(ratio).restored(json.loads(json.dumps(resumed._asdict())))
    assert abs(sum(of_each) - 2000 * ratio) < 1
    assert set(of_each) <= {int(ratio), int(ratio) + 1}, "spread evenly"
    assert pace == resumed == Pace(ratio, 2000, sum(of_each), sum(of_each))


def test_a_pace_of_another_ratio_begins_again() -> None:
    saved = Pace(3.0).after(3).after(3)._asdict()
    assert Pace(0.5).restored(saved) == Pace(0.5)
    assert Pace(0.5).restored({}) == Pace(0.5), "a checkpoint from before the setting"


@pytest.mark.some(1)
@pytest.mark.parametrize(("ratio", "expected"), [(2.5, [7, 8, 7]), (0.5, [1, 2, 1]), (1.0, [3, 3, 3])])
def test_the_critic_is_updated_by_its_ratio_and_a_resumed_one_likewise(
    policy, judge, batch, tmp_path, ratio: float, expected: list[int]
) -> None:
    def trainer() -> PolicyTrainer:
        return trainer_of(policy, critic_path=judge, critic_ratio=ratio, **(PPO | {"lr": 1e-3}))

    whole, first, second = trainer(), trainer(), trainer()
    reports = [whole.step(batch, version) for version in range(3)]
    assert [one.metrics["critic/updates"] for one in reports] == expected
    total, num_policy = sum(expected), 9
    assert whole.critic.num_steps == total
    assert whole._num_steps == num_policy
    assert reports[-1].metrics["critic/updates_per_policy_update"] == total / num_policy
    first.step(batch, 0)
    write_snapshot(first.snapshot(1), tmp_path, 0)
    second.restore(str(tmp_path))
    resumed = [second.step(batch, version) for version in (1, 2)]
    assert [one.metrics["critic/updates"] for one in resumed] == expected[1:]
    assert resumed[-1].metrics["critic/updates_per_policy_update"] == total / num_policy
    for mine, theirs in ((whole, second), (whole.critic.backend, second.critic.backend)):
        assert all(
            torch.equal(one, other)
            for (_, one), (_, other) in zip(mine.export_weights(), theirs.export_weights(), strict=True)
        )


def test_several_updates_of_the_critic_are_those_of_a_plain_loop(policy, judge, batch) -> None:
    """One policy update and three of the critic: the same critic as three epochs make, on the same returns."""
    trainer = trainer_of(policy, 60, critic_path=judge, critic_ratio=3.0, **(PPO | {"epochs": 1}))
    before = {name: tensor.clone() for name, tensor in trainer.critic.backend.export_weights()}
    report = trainer.step(batch, 0)
    expected, facts = oracle(judge, batch)
    after = dict(trainer.critic.backend.export_weights())
    moved = sum(float((expected[name] - old).square().sum()) for name, old in before.items())
    error = sum(float((after[name] - expected[name]).square().sum()) for name in after)
    assert error**0.5 < 1e-4 * moved**0.5
    assert {name: report.metrics[name] for name in facts} == pytest.approx(facts, rel=1e-4)
    assert trainer._num_steps == 1


def test_skipped_updates_of_the_critic_lower_the_realised_ratio_and_are_not_made_up(policy, judge, batch) -> None:
    trainer = trainer_of(policy, critic_path=judge, critic_ratio=2.0, **(PPO | {"epochs": 1}))
    trainer.step(batch, 0)
    with torch.no_grad():
        trainer.critic.backend._model.classifier.score.weight[0, 0] = np.nan
    metrics = trainer.step(batch, 1).metrics
    assert (metrics["critic/updates"], metrics["critic/skipped_updates"]) == (0, 2)
    assert metrics["critic/updates_per_policy_update"] == 1.0
    assert trainer.critic.pace.num_next == 2


def test_a_step_that_is_ended_leaves_the_pace_as_it_was(policy, judge, batch) -> None:
    trainer = trainer_of(policy, critic_path=judge, critic_ratio=1.5, **(PPO | {"epochs": 1}))
    trainer.step(batch, 0)
    before = trainer.critic.pace
    trainer.stop.request()
    with pytest.raises(StepEndedError):
        trainer.step(batch, 1)
    assert trainer.critic.pace == before


@pytest.mark.full
@pytest.mark.parametrize("ratio", [2.5, 0.3])
def test_2000_updates_of_a_real_policy_realise_the_ratio(policy, judge, batch, ratio: float) -> None:
    trainer = trainer_of(policy, 1000, critic_path=judge, critic_ratio=ratio, **(PPO | {"epochs": 10, "lr": 1e-4}))
    for version in range(200):
        metrics = trainer.step(batch, version).metrics
    assert trainer._num_steps == 2000
    assert abs(trainer.critic.num_steps / 2000 / ratio - 1) < 0.05
    assert metrics["critic/updates_per_policy_update"] == trainer.critic.num_steps / 2000
