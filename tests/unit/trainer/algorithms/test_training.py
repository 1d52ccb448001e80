"""Every algorithm trains: whole steps of a tiny policy on plain torch, the same however the work is split.

Ranks are played by threads, which exchange what ranks exchange within a step; their gradients are added up here.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.platform.checks.load import compose_config
from penstock.trainer.algorithms.catalog import entries
from penstock.trainer.batches.samples import batch_samples, policy_sequences, reward_batch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.policy_trainer import PolicyTrainer
from tests.algorithms import algorithm_config, resolved
from tests.unit.trainer.torch_trainer import logprobs_of, scored, trainer_of

PRESETS = sorted(path.stem for path in (Path(__file__).parents[4] / "conf" / "algorithm").glob("*.yaml"))
SUMS = ["seq_mean_token_sum", "constant_length"]
SEQUENCE = {"aggregation": "seq_mean_token_mean", "correction": "none"}
VARIANTS = {
    "gspo_token": {"loss": "gspo_token", "proximal": "behavior"} | SEQUENCE,
    "dual_clip": {"loss": "dual_clip", "proximal": "behavior", "correction": "none"},
    "reinforce": {"loss": "reinforce"},
    "sft": {"loss": "sft", "correction": "none"},
    "ipo_by_sums": {"loss": "ipo", "correction": "none", "ipo_length": "sum"},
    "ipo": {"loss": "ipo", "correction": "none", "pairs": "all", "pair_margin": 0.2},
    "reinforce_pp_kl": {"advantage": "reinforce_pp", "kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"},
    "tis_token": {"correction": ["tis_token", "opsm", "veto"]},
    "tis_seq": {"correction": ["tis_seq", "mis_seq_geo"], "aggregation": "seq_mean_token_sum", "geo_low": 0.5},
    "mis_token": {"correction": "mis_token", "kl_coefficient": 0.2, "kl_estimator": "k3"},
    "masks_and_kl": {"correction": ["decoupled", "opsm"], "correction_cap": 1.2, "kl_coefficient": 0.3},
    "f_tis": {"correction": "f_tis", "f_tis_max_kl": 0.01},
    "own": {"loss": "tests.unit.trainer.algorithms.own:squared", "correction": "none"},
    "own_advantage": {"advantage": "tests.unit.trainer.algorithms.own:half_of_the_reward"},
    "staleness_and_entropy": {"staleness_decay": 0.6, "entropy_top_share": 0.3},
    "heads": {"reward_weights": {"right": 1.0, "short": 0.5}},
    "gmpo": {"loss": "gmpo", "proximal": "behavior"} | SEQUENCE,
    "clip_cov": {"loss": "clip_cov", "proximal": "recompute", "clip_cov_share": 0.2, "min_covariance": 0.01},
    "kl_cov": {"loss": "kl_cov", "proximal": "recompute", "kl_cov_share": 0.2, "epochs": 2},
    "m2po": {"correction": ["tis_token", "m2po"], "proximal": "recompute", "m2po_moment": 0.2},
    "weights_of_mean_1": {"correction": "tis_token", "tis_low": 0.5, "renormalize": "weights"},
    "maxrl": {"advantage": "maxrl", "aggregation": "prompt_mean"},
    "pass_at_k": {"advantage": "pass_at_k"},
    "teacher": {"teacher_coefficient": 0.5},
    "nll": {"nll_coefficient": 0.3},
    "rpo": {"loss": "online_dpo", "correction": "none", "nll_coefficient": 0.3, "label_smoothing": 0.1, "pairs": "all"},
    "overlong_mask": {"overlong": "mask"},
    "overlong_drop": {"overlong": "drop"},
    "overlong_penalty": {"overlong": "penalty", "overlong_ramp_share": 2 / 3},
}


def settings_of(name: str) -> dict:
    if name in VARIANTS:
        return VARIANTS[name]
    chosen = [f"algorithm={name}", *(["teacher.path=somewhere"] if name == "distill" else [])]
    if name == "gspo":
        chosen.append("algorithm.mini_batches=1")  # of three groups there are no four mini-batches
    return {"preset": compose_config(["experiment=arithmetic", *chosen]).algorithm}


def algorithm_of(name: str) -> AlgorithmConfig:
    settings = settings_of(name)
    return settings.get("preset") or algorithm_config(**settings)


def gradient(trainer: PolicyTrainer, parts: list[tuple[list, list]]) -> torch.Tensor:
    """Flat gradient of one step that the batch reaches in these parts, caught before the optimizer uses it."""
    backend, caught = trainer.backend, []

    def catch(normaliser: float):
        flat = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in backend._model.parameters()]
        caught.append(torch.cat([one.flatten() for one in flat]) / normaliser)
        return type(backend).optimizer_step(backend, normaliser)

    backend.optimizer_step = catch
    *firsts, (payloads, references) = parts
    for some, theirs in firsts:
        trainer.accumulate(scored(some, theirs, theirs), 5)
    trainer.step(scored(payloads, references, references), 5)
    return caught[0]


def sum_over_ranks(trainers: list[PolicyTrainer], aged: list, references: list) -> torch.Tensor:
    """Sum of the gradients of trainers that each have their share of one batch."""
    world_size = len(trainers)
    barrier, given = Barrier(world_size, timeout=60), [np.empty(0)] * world_size
    operations = {"sum": sum, "max": lambda arrays: np.maximum.reduce(list(arrays))}

    def play(rank: int) -> torch.Tensor:
        def all_reduce(values: np.ndarray, operation: str) -> np.ndarray:
            given[rank] = values.copy()
            barrier.wait()
            reduced = operations[operation](given)
            barrier.wait()
            return reduced

        backend = trainers[rank].backend
        backend.data_parallel_rank, backend.data_parallel_size, backend.all_reduce = rank, world_size, all_reduce
        try:
            return gradient(trainers[rank], [(aged, references)])
        except BaseException:
            barrier.abort()  # the others wait for nothing
            raise

    with ThreadPoolExecutor(world_size) as threads:
        return torch.stack(list(threads.map(play, range(world_size)))).sum(0)


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_the_gradient_does_not_depend_on_micro_batches_order_ranks_or_parts(name, policy, aged, references) -> None:
    settings = settings_of(name)
    whole = gradient(trainer_of(policy, 1000, **settings), [(aged, references)])
    assert torch.isfinite(whole).all()
    assert float(whole.norm()) > 1e-6
    splits = {"small micro-batches": gradient(trainer_of(policy, 60, **settings), [(aged[::-1], references[::-1])])}
    for world_size in (2, 5):
        trainers = [trainer_of(policy, 60, **settings) for _ in range(world_size)]
        splits[f"{world_size} ranks"] = sum_over_ranks(trainers, aged, references)
    algorithm = algorithm_of(name)
    needs_whole = algorithm.advantage.name.startswith(("reinforce_pp", "gae")) or algorithm.imitates_passing
    if not needs_whole and not algorithm.entries_of_batch:
        parts = [(aged[:1], references[:1]), (aged[1:], references[1:])]
        splits["in parts"] = gradient(trainer_of(policy, 60, **settings), parts)
    assert {split: close(found, whole) for split, found in splits.items()} == dict.fromkeys(splits, True)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_steps_change_the_policy_and_report_finite_metrics(name, policy, aged, references) -> None:
    trainer = trainer_of(policy, 60, **settings_of(name))
    before = torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()])
    reports = [trainer.step(scored(aged, references, references), 5 + step) for step in range(3)]
    after = torch.cat([tensor.flatten() for _, tensor in trainer.export_weights()])
    assert [report.version for report in reports] == [6, 7, 8]
    assert not torch.equal(before, after)
    assert all(np.isfinite(list(report.metrics.values())).all() for report in reports)
    tokens = [sum(report.metrics.get(f"ratio/staleness_tokens/{b}", 0) for b in ("0", "2_3")) for report in reports]
    assert tokens[0] > 0, "versions 3 and 5 at version 5 are staleness 2 and 0"


def test_every_loss_advantage_and_correction_that_can_train_is_trained_here() -> None:
    trained = [algorithm_of(name) for name in (*PRESETS, *VARIANTS)]
    seen = {("loss", one.loss.name) for one in trained} | {("advantage", one.advantage.name) for one in trained}
    seen |= {("correction", name) for one in trained for name in one.correction.chain}
    wanted = {(e.kind, e.name) for e in entries() if e.kind in ("loss", "advantage", "correction")}
    assert wanted - {("loss", "value")} <= seen, "value is the loss of gae's critic"


def test_the_pair_loss_of_a_batch_is_the_mean_over_its_pairs(policy, aged, references) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    report = trainer_of(policy, 60, **settings_of("online_dpo")).step(scored(aged, references), 5)
    losses = []
    for group, scores in zip(aged, references, strict=True):
        drift, start = [], 0
        for one in group.trajectories:
            n = one.num_sampled_tokens
            drift.append(logprobs_of(model, one).sum() - scores[start : start + n].astype(np.float64).sum())
            start += n
        rewards = [one.reward for one in group.trajectories]
        if max(rewards) > min(rewards):
            delta = drift[rewards.index(max(rewards))] - drift[rewards.index(min(rewards))]
            losses.append(np.log1p(np.exp(-0.1 * delta)))
    assert len(losses) == 2
    assert report.metrics["loss/policy"] == pytest.approx(np.mean(losses), rel=1e-5)


def nll_of(policy: str, payloads: list[GroupPayload]) -> dict[str, np.ndarray]:
    """Name of a trajectory -> −logprob of its sampled tokens, by unpacked forwards in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    return {one.trajectory_id: -logprobs_of(model, one) for group in payloads for one in group.trajectories}


@pytest.mark.some(2)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean", *SUMS])
def test_the_anchor_is_the_mean_over_the_tokens_of_answers_that_pass(aggregation: str, policy, aged) -> None:
    """VAPO's normaliser, whatever the aggregation of the policy loss; of each mini-batch by itself."""
    nll = nll_of(policy, aged)
    passing = [["0/0"], ["1/0", "1/1", "1/2"], ["2/2"]]
    of_all = np.concatenate([nll[name] for names in passing for name in names]).mean()
    of_each = np.mean([np.concatenate([nll[name] for name in names]).mean() for names in passing])
    assert abs(of_all - of_each) > 0.001
    settings = {"aggregation": aggregation, "proximal": "recompute", "lr": 1e-12}
    for mini_batches, expected in ((1, of_all), (3, of_each)):
        losses = [
            trainer_of(policy, 60, mini_batches=mini_batches, nll_coefficient=weight, **settings)
            .step(aged, 5)
            .metrics["loss/policy"]
            for weight in (0.0, 10.0)
        ]
        assert losses[1] - losses[0] == pytest.approx(10 * expected, rel=1e-5)


def test_the_anchor_of_pairs_is_the_mean_over_pairs_of_the_better_answers_mean(policy, aged, references) -> None:
    """RPO: an answer that wins two pairs counts twice. Groups have the rewards 1 0 0, 1 1 1 and 0 0.5 1: five pairs."""
    nll = {name: tokens.mean() for name, tokens in nll_of(policy, aged).items()}
    losses = [
        trainer_of(policy, 60, **VARIANTS["rpo"] | {"nll_coefficient": weight})
        .step(scored(aged, references), 5)
        .metrics["loss/policy"]
        for weight in (0.0, 10.0)
    ]
    assert losses[1] - losses[0] == pytest.approx(10 * (2 * nll["0/0"] + 2 * nll["2/2"] + nll["2/1"]) / 5, rel=1e-5)


def test_the_anchor_on_answers_that_pass_needs_the_whole_batch(policy, aged) -> None:
    with pytest.raises(
        TrainingError, match=r"nll_coefficient=0\.3 averages over the answers that pass in whole batches"
    ):
        trainer_of(policy, **VARIANTS["nll"]).accumulate(aged[:1], 5)


def test_a_batch_without_pairs_is_a_step_without_gradient(policy, aged, references) -> None:
    report = trainer_of(policy, 60, **settings_of("online_dpo")).step(scored(aged[1:2], references[1:2]), 5)
    assert (report.skipped, report.metrics["loss/grad_norm"]) == (False, 0.0)


def test_pairs_beyond_the_token_budget_are_refused_with_both_numbers(policy, aged, references) -> None:
    trainer = trainer_of(policy, 32, loss="online_dpo", correction="none", pairs="all")
    with pytest.raises(
        ShapeError,
        match=r"max_tokens_per_micro_batch=32 is below 40 tokens: .* in parts of 8, 8, 24 tokens, .* at least 40",
    ):
        trainer.step(scored(aged, references), 5)


@pytest.mark.parametrize("name", ["online_dpo", "reinforce_pp_kl", "mis_token"])
def test_an_algorithm_that_compares_with_a_reference_wants_its_logprobs(name, policy, aged) -> None:
    settings = VARIANTS.get(name) or settings_of(name)
    with pytest.raises(TrainingError, match="without reference logprobs"):
        trainer_of(policy, 60, **settings).step(aged, 5)


def test_a_missing_part_of_the_reward_is_named(policy, batch) -> None:
    with pytest.raises(TrainingError, match=r"reward_weights\.right: trajectory 0/0 has no such part"):
        trainer_of(policy, **VARIANTS["heads"]).step(batch, 0)


class TestOverlong:
    """Members 0/2 and 2/2 were cut off at the limit."""

    def weights_of_groups(self, policy: str, aged: list[GroupPayload], **settings) -> tuple[torch.Tensor, dict]:
        trainer = trainer_of(policy, correction="none", advantage="dr_grpo", **settings)
        report = trainer.step(aged, 5)
        return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()]), report.metrics

    def test_drop_is_the_batch_without_them(self, policy, aged) -> None:
        kept = [
            GroupPayload(group.group_id, tuple(one for one in group.trajectories if one.finish_reason != "length"))
            for group in aged
        ]
        dropped, metrics = self.weights_of_groups(policy, aged, overlong="drop")
        without, _ = self.weights_of_groups(policy, kept)
        assert torch.equal(dropped, without)
        assert metrics["length/truncated_share"] == pytest.approx(2 / 9), "they are still counted"

    def test_mask_keeps_them_in_the_baseline_and_drop_does_not(self, policy, aged) -> None:
        masked, _ = self.weights_of_groups(policy, aged, overlong="mask")
        dropped, _ = self.weights_of_groups(policy, aged, overlong="drop")
        every, _ = self.weights_of_groups(policy, aged)
        assert not torch.equal(masked, dropped)
        assert not torch.equal(masked, every)

    def test_a_batch_of_nothing_else_is_a_step_without_gradient(self, policy, aged) -> None:
        cut = [
            GroupPayload(group.group_id, tuple(replace(one, finish_reason="length") for one in group.trajectories))
            for group in aged
        ]
        for overlong in ("mask", "drop"):
            _, metrics = self.weights_of_groups(policy, cut, overlong=overlong)
            assert metrics["loss/grad_norm"] == 0.0


def test_staleness_is_counted_per_token_from_the_version_of_the_step(policy, aged) -> None:
    members = [one for group in aged for one in group.trajectories]
    old, every = (sum(one.num_sampled_tokens // n for one in members) for n in (2, 1))
    metrics = trainer_of(policy).step(aged, 6).metrics
    buckets = {name: value for name, value in metrics.items() if name.startswith("ratio/staleness_tokens")}
    assert buckets == {"ratio/staleness_tokens/2_3": old, "ratio/staleness_tokens/1": every - old}
    streamed = trainer_of(policy)
    streamed.accumulate(aged[:2], 6)
    found = streamed.step(aged[2:], 6).metrics
    assert {name: found[name] for name in buckets} == buckets


def test_trimmed_tokens_take_their_own_advantages_with_them(aged, references) -> None:
    config = resolved(**VARIANTS["reinforce_pp_kl"], advantage_std="none")
    whole = policy_sequences(scored(aged, references), config, 30)
    trimmed = policy_sequences(scored(aged, references, min_versions=[4] * 3), config, 30)
    pairs = [(a.advantages, b.advantages) for a, b in zip(whole, trimmed, strict=True) if len(b.targets) > 2]
    assert len(pairs) >= 3
    for before, after in pairs:  # other tokens are in the mean now, so compare what is between neighbours
        np.testing.assert_allclose(np.diff(after), np.diff(before)[-len(after) + 1 :], atol=1e-12)
        assert np.abs(np.diff(after)).min() > 1e-6, "the divergence differs from token to token"


def test_the_overlong_penalty_is_in_the_reward_before_the_baseline(aged) -> None:
    config = resolved(**VARIANTS["overlong_penalty"], advantage="dr_grpo")
    members = batch_samples(aged, config)
    found = reward_batch(members, config, max_new_tokens=30)
    lengths = [one.trajectory.num_sampled_tokens for one in members]
    expected = [one.reward - min(max((n - 10) / 20, 0), 1) for one, n in zip(members, lengths, strict=True)]
    np.testing.assert_allclose(found.rewards, expected, atol=1e-12)
    assert any(reward != one.reward for reward, one in zip(found.rewards, members, strict=True))


def test_renormalising_divides_by_the_share_that_was_kept(policy, aged) -> None:
    chain = {"correction": ["decoupled"], "correction_cap": 1.2, "aggregation": "token_mean"}
    plain, renormalised = trainer_of(policy, 60, **chain), trainer_of(policy, 60, renormalize="kept", **chain)
    before = gradient(plain, [(aged, [])])
    after = gradient(renormalised, [(aged, [])])
    masked = trainer_of(policy, 60, **chain).step(aged, 5).metrics["ratio/masked_share"]
    assert 0.1 < masked < 0.9
    assert close(after, before / (1 - masked))
    parts = gradient(trainer_of(policy, 60, renormalize="kept", **chain), [(aged[:2], []), (aged[2:], [])])
    assert close(parts, after)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        ("tis_token", "token_mean"),
        *(("tis_seq", mode) for mode in ("seq_mean_token_mean", *SUMS)),
        *(("tis_token", mode) for mode in SUMS),
    ],
)
def test_weights_of_mean_1_over_the_batch_are_the_weights_by_their_mean(name: str, aggregation, policy, aged) -> None:
    """Of all tokens, or with `tis_seq` of the sequences; the mean is that of numpy over unpacked forwards."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    members = [one for group in aged for one in group.trajectories if one.num_sampled_tokens]
    drifts = [logprobs_of(model, one) - one.behavior_logprobs[one.loss_mask].astype(np.float64) for one in members]
    per_token = np.clip(np.exp(np.concatenate(drifts)), 0.6, 1.3)
    per_sequence = np.clip(np.exp([one.sum() for one in drifts]), 0.6, 1.3)
    mean = per_token.mean() if name == "tis_token" else per_sequence.mean()
    settings = {"correction": name, "tis_low": 0.6, "tis_cap": 1.3, "aggregation": aggregation}
    plain = gradient(trainer_of(policy, 60, **settings), [(aged, [])])
    parts = [(aged[:2], []), (aged[2:], [])]
    for split in ([(aged, [])], parts):
        found = gradient(trainer_of(policy, 60, renormalize="weights", **settings), split)
        assert close(found, plain / mean)
    assert abs(mean - 1) > 0.01
