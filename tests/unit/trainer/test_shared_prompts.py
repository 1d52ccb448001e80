"""Answers behind one copy of their prompt: scores, gradients and metrics of each behind its own, for fewer tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ShapeError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence, plan_with_shared_prompts
from penstock.trainer.models.policy_model import PolicyModel
from penstock.trainer.policy_trainer import PolicyTrainer

from .test_preference_steps import PAIRS, make_pairs
from .torch_trainer import VOCAB, scored, trainer_of, trajectory

CPU = torch.device("cpu")


def sequence(prompt: list[int], answer: list[int], first_target: int = 0, unit: int | None = None) -> TrainingSequence:
    targets = np.arange(len(prompt) + first_target, len(prompt) + len(answer))
    token_ids, behavior = np.array(prompt + answer), np.zeros(len(targets), np.float32)
    return TrainingSequence(token_ids, targets, behavior, prompt_length=len(prompt), unit=unit)


def groups(*shapes: tuple[int, list[int]], unit: int | None = None) -> list[TrainingSequence]:
    """Per group its prompt's length and those of its answers; members of groups take turns."""
    rng = np.random.default_rng(0)
    made = []
    for prompt_length, answers in shapes:
        prompt = rng.integers(0, VOCAB, prompt_length).tolist()
        made.append([sequence(prompt, rng.integers(0, VOCAB, n).tolist(), unit=unit) for n in answers])
    return [group[member] for member in range(max(map(len, made))) for group in made if member < len(group)]


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2"])
def test_scores_and_gradients_are_those_of_single_sequences(architecture) -> None:
    import transformers

    torch.manual_seed(0)
    options = {"head_dim": 8} if architecture == "Qwen3" else {}
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = PolicyModel(getattr(transformers, f"{architecture}ForCausalLM")(config)).train()
    sequences = groups((5, [7, 1, 12]), (3, [4, 9]), (8, [6]))
    sequences.append(sequence(sequences[0].token_ids[:5].tolist(), [3, 1, 4, 1, 5], first_target=2))
    weights = [torch.randn(len(one.targets), generator=torch.manual_seed(n)) for n, one in enumerate(sequences)]

    def scores_and_gradient(plans) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        scores = torch.zeros(len(sequences), 12)
        for plan in plans:
            batch = collate(plan, sequences, device=CPU, needs_mask=True)
            found = batch.inputs.call(model, 0.8)[0]
            order = [index for row in plan.rows for index in row]
            (found * torch.cat([weights[index] for index in order])).sum().backward()
            scores[batch.sequence_index, batch.token_index] = found.detach()
        return scores, torch.cat([one.grad.flatten() for one in model.parameters()])

    alone = scores_and_gradient([MicroBatchPlan(((n,),), one.num_inputs) for n, one in enumerate(sequences)])
    for max_tokens in (100, 30, 20):
        plan = plan_with_shared_prompts(sequences, 1, max_tokens)
        assert plan.shared_lengths
        scores, gradient = scores_and_gradient(plan.ranks[0])
        torch.testing.assert_close(scores, alone[0], rtol=1e-5, atol=1e-5)
        assert (gradient - alone[1]).norm() <= 1e-5 * alone[1].norm()


@pytest.fixture
def shared_batch() -> list[GroupPayload]:
    rng = np.random.default_rng(2)
    made = []
    for group, (lengths, rewards) in enumerate(
        [([1, 5, 12], [1.0, 0.0, 0.0]), ([7, 3, 9], [1.0, 1.0, 0.0]), ([14, 14, 20], [0.0, 0.5, 1.0])]
    ):
        prompt = rng.integers(2, VOCAB, 3 + group).tolist()
        answers = [rng.integers(2, VOCAB, length).tolist() for length in lengths]
        members = zip(answers, rewards, strict=True)
        answered = (trajectory(f"{group}/{n}", prompt, one, rng, reward) for n, (one, reward) in enumerate(members))
        made.append(GroupPayload(GroupId(group), tuple(answered)))
    return made


def gradient_and_metrics(trainer: PolicyTrainer, batch, **arguments) -> tuple[torch.Tensor, dict[str, float]]:
    """The flat gradient of the first update of a step, before it is clipped, and the step's metrics."""
    caught, backend = [], trainer.backend

    def catch(normaliser: float):
        caught.append(torch.cat([one.grad.flatten().clone() for one in backend._model.parameters()]))
        return type(backend).optimizer_step(backend, normaliser)

    backend.optimizer_step = catch
    metrics = trainer.step(batch, **arguments).metrics
    return caught[0], metrics


ALGORITHMS = {
    "grpo": {"correction": "decoupled"},
    "gspo": {"loss": "gspo", "aggregation": "seq_mean_token_mean", "correction": "none"},
    "recompute": {"proximal": "recompute", "mini_batches": 3, "epochs": 2},
    "gae": {"advantage": "gae", "correction": "none"},
    "online_dpo": {**PAIRS, "pairs": "best_worst"},
}


@pytest.mark.parametrize("max_tokens", [200, 46])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_is_the_same(policy, shared_batch, name, max_tokens) -> None:
    trainers = [trainer_of(policy, max_tokens, share_prompts=on, **ALGORITHMS[name]) for on in (False, True)]
    references = [np.concatenate(trainers[0]._passes.per_sampled_token([one])) for one in shared_batch]
    groups = scored(shared_batch, references if name == "online_dpo" else ())
    expected, found = (gradient_and_metrics(side, groups, version=0) for side in trainers)
    assert (found[0] - expected[0]).norm() <= 1e-5 * expected[0].norm()
    assert expected[0].norm() > 0
    for metric, value in expected[1].items():
        if not metric.startswith("trainer/"):
            assert found[1][metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric
    assert found[1]["trainer/tflops_per_device"] > 0


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_pairs_share_their_prompt(policy, kind) -> None:
    pairs = make_pairs(7)
    alone, shared = (trainer_of(policy, 40, share_prompts=on, kind=kind, **PAIRS) for on in (False, True))
    for _ in range(3):
        expected, found = (one.preference_step(pairs)["preference/loss"] for one in (alone, shared))
        assert found == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(shared.preference_margins(pairs), alone.preference_margins(pairs), atol=1e-5)


def test_a_group_above_the_budget_has_a_copy_of_its_prompt_in_every_row() -> None:
    sequences = groups((10, [11, 11, 11, 11, 11]))
    plan = plan_with_shared_prompts(sequences, 1, 32)
    rows = [row for micro_batch in plan.ranks[0] for row in micro_batch.rows]
    assert sorted(rows) == [(0, 1), (2, 3), (4,)]
    assert plan.shared_lengths == [10, 10]
    assert max(one.num_padded_tokens for one in plan.ranks[0]) == 30, "10 + 2 x 10: the last token is not fed"


def test_prompts_of_other_tokens_and_other_units_are_not_shared() -> None:
    prompt = [1, 2, 3]
    sequences = [sequence(prompt, [4, 5], unit=0), sequence(prompt, [4, 5], unit=1), sequence([1, 2, 4], [4, 5])]
    assert plan_with_shared_prompts(sequences, 1, 100).shared_lengths == []
    with pytest.raises(ShapeError, match="needs all of them in one micro-batch"):
        plan_with_shared_prompts(groups((10, [11, 11, 11]), unit=0), 1, 32)


def test_attention_that_costs_more_than_the_prompt_is_not_paid() -> None:
    sequences = groups((10, [101, 101, 101]))
    assert plan_with_shared_prompts(sequences, 1, 1000, attention_share=0.0001).shared_lengths == [10, 10]
    assert plan_with_shared_prompts(sequences, 1, 1000, attention_share=0.01).shared_lengths == []


def test_shared_prompts_are_no_work(policy) -> None:
    sequences, flops = groups((12, [4, 4, 4])), []
    for share_prompts in (False, True):
        trainer = trainer_of(policy, 200, share_prompts=share_prompts)
        trainer._flops.trained(sequences, trainer._passes.plan(sequences).shared_lengths)
        flops.append(trainer._flops.flops)
    assert 0.4 < flops[1] / flops[0] < 0.6, "21 tokens instead of 45, and the head as before"
