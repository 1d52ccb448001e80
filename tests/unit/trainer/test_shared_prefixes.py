"""Sequences behind one copy of what they share: scores, gradients and metrics of each alone, for fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ShapeError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload, Thread, Trajectory
from penstock.dataflow.versions import concatenate_spans
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence, plan_with_shared_prefixes
from penstock.trainer.batches.samples import sampled_tokens
from penstock.trainer.models.policy_model import PolicyModel
from penstock.trainer.models.varlen_attention import register_varlen
from penstock.trainer.policy_trainer import PolicyTrainer

from .test_preference_steps import PAIRS, make_pairs
from .torch_trainer import VOCAB, scored, trainer_of, trajectory

CPU = torch.device("cpu")
ATTENTIONS = [("sdpa", "rows"), ("varlen", "single_row")]


def sequence(prompt: list[int], answer: list[int], first_target: int = 0, unit: int | None = None) -> TrainingSequence:
    targets = np.arange(len(prompt) + first_target, len(prompt) + len(answer))
    token_ids, behavior = np.array(prompt + answer), np.zeros(len(targets), np.float32)
    return TrainingSequence(token_ids, targets, behavior, unit=unit)


def groups(*shapes: tuple[int, list[int]], unit: int | None = None) -> list[TrainingSequence]:
    """Per group its prompt's length and those of its answers, which do not begin alike; members take turns."""
    rng = np.random.default_rng(0)
    made = []
    for num_tokens, answers in shapes:
        prompt = rng.integers(0, VOCAB, num_tokens).tolist()
        drawn = [[first, *rng.integers(0, VOCAB, n - 1).tolist()] for first, n in enumerate(answers)]
        made.append([sequence(prompt, answer, unit=unit) for answer in drawn])
    return [group[member] for member in range(max(map(len, made))) for group in made if member < len(group)]


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
"""The second layer attends to six tokens: from behind some answers to a part of the prompt, from behind others to
none."""
MODELS = {"Qwen3": {"head_dim": 8}, "Qwen2": {}, "Qwen2, window": WINDOW}


def model_of(architecture: str, attention: str, dtype: torch.dtype = torch.float32) -> PolicyModel:
    import transformers

    register_varlen()
    torch.manual_seed(0)
    family = architecture.partition(",")[0]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, **MODELS[architecture],
    )  # fmt: skip
    return PolicyModel(getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)).train()


def scores_and_gradient(
    model: PolicyModel, plans: Sequence[MicroBatchPlan], sequences: list[TrainingSequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[sequences, longest answer]` logprobs, and the flat gradient of their sum with random weights."""
    weights = [torch.randn(len(one.targets), generator=torch.manual_seed(n)) for n, one in enumerate(sequences)]
    scores = torch.zeros(len(sequences), max(map(len, weights)))
    for plan in plans:
        needs_mask = model.hf_model.config._attn_implementation == "sdpa"
        batch = collate(plan, sequences, device=CPU, needs_mask=needs_mask)
        found = batch.inputs.call(model, 0.8)[0]
        order = [index for row in plan.rows for index in row]
        (found * torch.cat([weights[index] for index in order])).sum().backward()
        scores[batch.sequence_index, batch.token_index] = found.detach()
    return scores, torch.cat([one.grad.flatten().float() for one in model.parameters()])


def sequences_to_share() -> list[TrainingSequence]:
    found = groups((5, [7, 1, 12]), (3, [4, 9]), (8, [6]))
    return [*found, sequence(found[0].token_ids[:5].tolist(), [3, 1, 4, 1, 5], first_target=2)]


def each_alone(sequences: list[TrainingSequence]) -> list[MicroBatchPlan]:
    return [MicroBatchPlan(((n,),), one.num_inputs) for n, one in enumerate(sequences)]


@pytest.mark.parametrize(("attention", "layout"), ATTENTIONS)
@pytest.mark.parametrize("architecture", MODELS)
def test_scores_and_gradients_are_those_of_single_sequences(architecture, attention, layout) -> None:
    sequences = sequences_to_share()
    alone = scores_and_gradient(model_of(architecture, "sdpa"), each_alone(sequences), sequences)
    for max_tokens in (100, 30, 20):
        plan = plan_with_shared_prefixes(sequences, 1, max_tokens, layout=layout)
        assert plan.shared_lengths
        scores, gradient = scores_and_gradient(model_of(architecture, attention), plan.ranks[0], sequences)
        torch.testing.assert_close(scores, alone[0], rtol=1e-5, atol=1e-5)
        assert (gradient - alone[1]).norm() <= 1e-5 * alone[1].norm()


def tree(unit: int | None = None) -> list[TrainingSequence]:
    """A thread, its fork, a fork of that, one of that one; a thread that ended early; equal ones; another prompt."""
    rng = np.random.default_rng(3)
    prompt, turn, fork, deeper, deepest, aside, other = (
        rng.integers(0, VOCAB, n).tolist() for n in (5, 8, 6, 5, 4, 3, 4)
    )
    return [
        sequence(prompt + turn[:4] + fork[:3], deeper, unit=unit),
        sequence(prompt, turn, unit=unit),
        sequence(other, [2, 7, 1, 8], unit=unit),
        sequence(prompt + turn[:4], aside, unit=unit),
        sequence(prompt + turn[:4], fork, unit=unit),
        sequence(prompt, turn[:4], first_target=1, unit=unit),  # the others go on behind its last token
        sequence(prompt + turn[:4] + fork[:3] + deeper[:2], deepest, unit=unit),
        sequence(prompt + turn[:4], aside, unit=unit),  # an equal one
        sequence(prompt, turn[:4] + aside, first_target=2, unit=unit),  # and one with other loss tokens
    ]


def num_prefixes(sequences: list[TrainingSequence]) -> int:
    """Nodes of the tree of all inputs."""
    return len({tuple(one.token_ids[:n]) for one in sequences for n in range(1, one.num_inputs + 1)})


@pytest.mark.parametrize(("attention", "layout"), ATTENTIONS)
@pytest.mark.parametrize("architecture", MODELS)
def test_a_tree_of_several_levels_has_the_scores_and_gradients_of_its_sequences(
    architecture, attention, layout
) -> None:
    sequences = tree()
    alone = scores_and_gradient(model_of(architecture, "sdpa"), each_alone(sequences), sequences)
    for max_tokens in (100, 25, 19):
        plan = plan_with_shared_prefixes(sequences, 1, max_tokens, layout=layout)
        num_tokens = sum(one.num_inputs for one in sequences) - sum(plan.shared_lengths)
        assert (num_tokens == num_prefixes(sequences)) == (max_tokens == 100), "what is cut is repeated"
        scores, gradient = scores_and_gradient(model_of(architecture, attention), plan.ranks[0], sequences)
        torch.testing.assert_close(scores, alone[0], rtol=1e-5, atol=1e-5)
        assert (gradient - alone[1]).norm() <= 1e-5 * alone[1].norm()


def test_a_tree_is_cut_near_its_root() -> None:
    """Two forks of a long turn, each with two answers, in a budget for one of them."""
    rng = np.random.default_rng(1)
    turn, forks = list(range(VOCAB)), [[1, *rng.integers(0, VOCAB, 19)], [2, *rng.integers(0, VOCAB, 19)]]
    sequences = [sequence(turn + forks[n % 2], [n, n, n]) for n in range(4)]
    plan = plan_with_shared_prefixes(sequences, 1, 50)
    rows = [row for one in plan.ranks[0] for row in one.rows]
    assert sorted(rows) == [(0, 2), (1, 3)]
    assert plan.shared_lengths == [40, 40]


def test_a_unit_shares_its_tree_whatever_the_attention_costs() -> None:
    sequences = tree(unit=0)
    (only,) = plan_with_shared_prefixes(sequences, 2, 60, attention_share=10.0).ranks[0]
    assert only.num_padded_tokens == num_prefixes(sequences)


def test_one_copy_of_a_token_is_sent_to_one_choice_of_experts() -> None:
    """Four members of a group of two engines, which computed its prompt each for itself; no routes are known of one."""
    sequences = [sequence([1, 2, 3, 4], [answer, 5]) for answer in (6, 7, 8, 9, 6)]
    for index, one in enumerate(sequences[:4]):
        routes = np.zeros((len(one.token_ids), 2, 1), np.uint8)
        routes[2:, 1] = index % 2
        sequences[index] = replace(one, routes=routes)
    (row,) = plan_with_shared_prefixes(sequences, 1, 100).ranks[0][0].in_order()
    assert row == [(2, 0), (0, 4), (1, 2), (3, 4), (4, 0)]


@pytest.mark.parametrize(("attention", "layout"), ATTENTIONS)
def test_in_bfloat16_it_is_no_further_from_float32_than_single_sequences(attention, layout) -> None:
    sequences = sequences_to_share() + groups((20, [9, 30, 2, 14]), (40, [5, 5, 5]))
    plan = plan_with_shared_prefixes(sequences, 1, 300, layout=layout).ranks[0]
    alone = each_alone(sequences)
    model = model_of("Qwen3", attention, torch.bfloat16)
    exact = model_of("Qwen3", attention)
    exact.load_state_dict(model.state_dict())
    expected = scores_and_gradient(exact, alone, sequences)
    errors = []
    for plans in (alone, plan):
        model.zero_grad()
        found = scores_and_gradient(model, plans, sequences)
        errors.append([float((one - two).norm()) for one, two in zip(found, expected, strict=True)])
    for unshared, shared in zip(*errors, strict=True):
        assert 0 < shared <= 1.2 * unshared, "1.2: both are sums of roundings"


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


@pytest.mark.some(4)
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


def of_threads(rng, name: str, reward: float) -> Trajectory:
    """A thread, two forks of it, and a fork of the second one."""
    threads = [trajectory(name, rng.integers(2, VOCAB, 4).tolist(), rng.integers(2, VOCAB, 5).tolist(), rng, reward)]
    for parent, num_tokens in ((0, 3), (0, 6), (2, 4)):
        context = threads[parent].token_ids.tolist()
        threads.append(trajectory(name, context, rng.integers(2, VOCAB, num_tokens).tolist(), rng, reward))
    return replace(
        threads[0],
        token_ids=np.concatenate([one.token_ids for one in threads]),
        loss_mask=np.concatenate([one.loss_mask for one in threads]),
        behavior_logprobs=np.concatenate([one.behavior_logprobs for one in threads]),
        spans=concatenate_spans([one.spans for one in threads]),
        threads=tuple(Thread(str(n), len(one.token_ids), "") for n, one in enumerate(threads)),
    )


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "online_dpo"])
def test_a_step_over_threads_that_fork_is_the_same_for_fewer_tokens(policy, name) -> None:
    rng = np.random.default_rng(4)
    rewards = [[1.0, 0.0, 0.25], [0.0, 1.0, 1.0], [0.5, 0.0, 1.0]]
    batch = [
        GroupPayload(GroupId(group), tuple(of_threads(rng, f"{group}/{n}", one) for n, one in enumerate(of_group)))
        for group, of_group in enumerate(rewards)
    ]
    trainers = [trainer_of(policy, 200, share_prompts=on, **ALGORITHMS[name]) for on in (False, True)]
    saved = trainers[1]._passes.plan(sampled_tokens(batch)).shared_lengths
    assert sum(saved) >= 3 * 3 * (8 + 9 + 14), "of each member, whose threads have 8, 11, 14 and 18 inputs"
    expected, found = (gradient_and_metrics(side, batch, version=0) for side in trainers)
    assert (found[0] - expected[0]).norm() <= 1e-5 * expected[0].norm()
    assert expected[0].norm() > 0
    for metric, value in expected[1].items():
        if not metric.startswith("trainer/"):
            assert found[1][metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric


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
    plan = plan_with_shared_prefixes(sequences, 1, 32)
    rows = [row for micro_batch in plan.ranks[0] for row in micro_batch.rows]
    assert sorted(map(len, rows)) == [1, 2, 2]
    assert plan.shared_lengths == [10, 10]
    assert max(one.num_padded_tokens for one in plan.ranks[0]) == 30, "10 + 2 x 10: the last token is not fed"


def test_prompts_of_other_tokens_and_other_units_are_not_shared() -> None:
    prompt = [1, 2, 3]
    sequences = [sequence(prompt, [4, 5], unit=0), sequence(prompt, [4, 5], unit=1), sequence([1, 2, 4], [4, 5])]
    assert plan_with_shared_prefixes(sequences, 1, 100).shared_lengths == []
    with pytest.raises(ShapeError, match="needs all of them in one micro-batch"):
        plan_with_shared_prefixes(groups((10, [11, 11, 11]), unit=0), 1, 32)


def test_attention_that_costs_more_than_the_prompt_is_not_paid() -> None:
    sequences = groups((10, [101, 101, 101]))
    assert plan_with_shared_prefixes(sequences, 1, 1000, attention_share=0.0001).shared_lengths == [10, 10]
    assert plan_with_shared_prefixes(sequences, 1, 1000, attention_share=0.01).shared_lengths == []
    without_mask = plan_with_shared_prefixes(sequences, 1, 1000, attention_share=0.01, layout="single_row")
    assert without_mask.shared_lengths == [10, 10]


def test_a_prompt_is_copied_where_a_rank_would_have_nothing_to_do() -> None:
    sequences = groups((10, [31] * 8))
    for layout in ("rows", "single_row"):
        plan = plan_with_shared_prefixes(sequences, 4, 1000, layout=layout)
        assert plan.shared_lengths == [10] * 4
        assert [sum(one.num_padded_tokens for one in rank) for rank in plan.ranks] == [70] * 4


def test_a_sequence_above_the_budget_is_named_by_its_place_in_the_batch() -> None:
    sequences = groups((10, [11, 11, 91]))
    with pytest.raises(ShapeError, match=r"below the longest sequence of this batch, 100 tokens \(sequence 2\)"):
        plan_with_shared_prefixes(sequences, 1, 32)


def test_shared_prompts_are_no_work(policy) -> None:
    sequences, flops = groups((12, [4, 4, 4])), []
    for share_prompts in (False, True):
        trainer = trainer_of(policy, 200, share_prompts=share_prompts)
        trainer._flops.trained(sequences, trainer._passes.plan(sequences).shared_lengths)
        flops.append(trainer._flops.flops)
    assert 0.4 < flops[1] / flops[0] < 0.6, "21 tokens instead of 45, and the head as before"
