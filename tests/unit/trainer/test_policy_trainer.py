"""A whole step on the plain torch backend, against numbers from an unpacked Hugging Face forward and numpy float64."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError, ShapeError, TrainingError
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.trainer.backend import poison_if_not_finite
from penstock.trainer.batches.collate import TrainingSequence, collate
from penstock.trainer.batches.packing import MicroBatchPlan
from penstock.trainer.build import attention_share, build_trainer, save_policy
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.policy_model import PolicyModel
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.tiny_policy import create_policy
from penstock.trainer.validation import trainer_violations
from penstock.weights.model_config import ModelConfig, ModelShape

VOCAB, TEMPERATURE = 20, 0.8
SHAPE = ModelShape(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
MODEL = ModelConfig(max_context_tokens=32, shape=SHAPE)
TOKENIZER = types.SimpleNamespace(bos_token_id=None, eos_token_id=1, pad_token_id=0, save_pretrained=lambda path: None)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("policy"))
    create_policy(MODEL, TOKENIZER, path, seed=1)
    return path


def trainer_of(
    policy: str, max_tokens: int = 100, lr: float = 1e-3, warmup_steps: int = 0, **algorithm
) -> PolicyTrainer:
    return build_trainer(
        policy,
        MODEL,
        TrainerConfig(
            backend="torch",
            max_tokens_per_micro_batch=max_tokens,
            optimizer=OptimizerConfig(lr=lr, warmup_steps=warmup_steps),
        ),
        AlgorithmConfig(**algorithm),
        rank=0,
        world_size=1,
        master_port=0,
        device="cpu",
        threads=1,
        seed=0,
        temperature=TEMPERATURE,
        max_new_tokens=30,
    )


def trajectory(name: str, prompt: list[int], response: list[int], rng, reward: float | None) -> Trajectory:
    """One trajectory whose second response token, if it has more than two, was not sampled (an observation)."""
    mask = np.array([False] * len(prompt) + [True] * len(response))
    if len(response) > 2:
        mask[len(prompt) + 1] = False
    behavior = np.where(mask, rng.normal(-3.0, 0.4, len(mask)), 0.0).astype(np.float32)
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        task_id=TaskId("t"),
        token_ids=np.array(prompt + response, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior,
        spans=(Span(0, int(mask.sum())),),
        prompt="",
        response="",
        finish_reason="length" if len(response) > 10 else "stop",
        reward=reward,
    )


@pytest.fixture
def batch() -> list[GroupPayload]:
    rng = np.random.default_rng(2)
    lengths = [[1, 5, 12], [7, 3, 9], [4, 4, 20]]
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]
    return [
        GroupPayload(
            GroupId(group),
            tuple(
                trajectory(
                    f"{group}/{member}",
                    rng.integers(2, VOCAB, 3 + group).tolist(),
                    rng.integers(2, VOCAB, lengths[group][member]).tolist(),
                    rng,
                    rewards[group][member],
                )
                for member in range(3)
            ),
        )
        for group in range(3)
    ]


def logprobs_of(model, one: Trajectory) -> np.ndarray:
    """`[sampled] float64` logprobs by an unpacked forward of one sequence."""
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double().numpy() / TEMPERATURE
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    positions = np.flatnonzero(one.loss_mask)
    return logprobs[positions - 1, one.token_ids[positions]]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "constant_length"])
@pytest.mark.parametrize("correction", ["none", "decoupled"])
def test_loss_and_metrics_equal_float64_numpy(policy, batch, aggregation, correction) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    report = trainer_of(policy, aggregation=aggregation, correction=correction, correction_cap=1.5).step(batch, 7)

    members = [one for group in batch for one in group.trajectories]
    counts = [int(one.loss_mask.sum()) for one in members]
    expected_loss, ratios, num_masked = 0.0, [], 0
    for group in batch:
        rewards = np.array([one.reward for one in group.trajectories])
        deviation = rewards.std(ddof=1)
        for one in group.trajectories:
            advantage = 0.0 if deviation == 0 else (one.reward - rewards.mean()) / (deviation + 1e-4)
            for target, behavior in zip(logprobs_of(model, one), one.behavior_logprobs[one.loss_mask], strict=True):
                ratio = np.exp(target - np.float64(behavior))
                ratios.append(ratio)
                factor = ratio if correction == "decoupled" else 1.0
                if correction == "decoupled" and ratio > 1.5:
                    factor, num_masked = 0.0, num_masked + 1
                normaliser = {
                    "token_mean": sum(counts),
                    "seq_mean_token_mean": len(members) * int(one.loss_mask.sum()),
                    "constant_length": len(members) * 30,
                }[aggregation]
                expected_loss += -advantage * factor / normaliser
    assert report.metrics["loss/policy"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-7)
    assert report.metrics["ratio/behavior_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert report.metrics["ratio/behavior_max"] == pytest.approx(np.max(ratios), rel=1e-5)
    assert report.metrics["ratio/masked_share"] == pytest.approx(num_masked / sum(counts))
    assert report.metrics["mismatch/abs_logprob_mean"] == pytest.approx(np.abs(np.log(ratios)).mean(), rel=1e-4)
    assert report.metrics["reward/mean"] == pytest.approx(5.5 / 9)
    assert report.metrics["reward/zero_variance_share"] == pytest.approx(1 / 3)
    assert report.metrics["length/mean_tokens"] == pytest.approx(np.mean(counts))
    assert report.metrics["length/truncated_share"] == pytest.approx(2 / 9)
    assert report.version == 8


def gradient_of(trainer: PolicyTrainer, batch) -> torch.Tensor:
    """Flat gradient of one step, caught before the optimizer uses it."""
    caught = []
    backend = trainer.backend

    def catch():
        caught.append(torch.cat([p.grad.flatten().clone() for p in backend._model.parameters()]))
        return type(backend).optimizer_step(backend)

    backend.optimizer_step = catch
    trainer.step(batch, 0)
    return caught[0]


@pytest.mark.parametrize("max_tokens", [32, 40, 1000])
def test_the_gradient_does_not_depend_on_the_token_budget_or_the_order(policy, batch, max_tokens) -> None:
    reference = gradient_of(trainer_of(policy, 60), batch)
    other = gradient_of(trainer_of(policy, max_tokens), batch[::-1])
    assert float((other - reference).norm() / reference.norm()) < 1e-5


def test_a_zero_variance_batch_has_zero_gradient(policy, batch) -> None:
    assert float(gradient_of(trainer_of(policy), batch[1:2]).norm()) == 0.0


@pytest.mark.parametrize("architecture", ["Qwen3", "Qwen2"])
def test_packed_rows_score_like_single_sequences(architecture) -> None:
    import transformers

    torch.manual_seed(0)
    options = {"head_dim": 8} if architecture == "Qwen3" else {}
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = PolicyModel(getattr(transformers, f"{architecture}ForCausalLM")(config)).train()
    rng = np.random.default_rng(0)
    sequences = []
    for length, prompt in [(9, 3), (14, 2), (4, 3), (22, 5), (2, 1)]:
        targets = np.arange(prompt, length)
        sequences.append(TrainingSequence(rng.integers(0, VOCAB, length), targets, np.zeros(len(targets), np.float32)))

    def scores(*rows: tuple[int, ...]) -> torch.Tensor:
        length = max(sum(sequences[index].num_inputs for index in row) for row in rows)
        batch = collate(MicroBatchPlan(rows, length), sequences, device=torch.device("cpu"), needs_mask=True)
        assert (batch.inputs.attention_mask is None) == all(len(row) == 1 for row in rows)
        return batch.inputs.call(model, 1.0)[0].detach()

    single = torch.cat([scores((index,)) for index in range(5)])
    torch.testing.assert_close(scores((0, 1), (2, 3, 4)), single, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores((0,), (1,), (2,), (3,), (4,)), single, rtol=1e-5, atol=1e-5)


def test_sampled_accuracy_is_the_mean_probability_of_the_whole_answer(policy) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    examples = [([2, 3, 4], [5]), ([3, 3], [7, 1]), ([9], [8, 8, 1])]
    probabilities = []
    for prompt, response in examples:
        softmax = model(torch.tensor([[*prompt, *response]])).logits[0].detach().double().softmax(-1).numpy()
        probabilities.append(np.prod([softmax[len(prompt) + i - 1, token] for i, token in enumerate(response)]))
    assert trainer_of(policy).teacher_forced(examples).sampled_accuracy == pytest.approx(
        np.mean(probabilities), rel=1e-4
    )


def test_supervised_steps_reach_teacher_forced_accuracy_one_and_greedy_agrees(policy) -> None:
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(policy, lr=1e-2)
    examples = [([2, 3, 4], [5, 6, 1]), ([3, 3], [7, 1]), ([9], [8, 8, 8, 1])]
    assert trainer.teacher_forced(examples).greedy_accuracy == 0.0
    first = trainer.supervised_step(examples)
    for _ in range(30):
        last = trainer.supervised_step(examples)
    assert last["sft/loss"] < 0.1 * first["sft/loss"]
    assert not [name for name in last if name.startswith(("ratio/", "mismatch/"))]
    assert trainer.teacher_forced(examples).greedy_accuracy == 1.0
    assert trainer.teacher_forced([*examples, ([2, 3, 4], [5, 6, 2])]).greedy_accuracy == pytest.approx(0.75)

    saved = str(Path(policy).parent / "sft")
    save_policy(trainer, saved, policy)
    model = AutoModelForCausalLM.from_pretrained(saved)
    for prompt, response in examples:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=len(response), do_sample=False)
        assert output[0, len(prompt) :].tolist() == response


def test_the_first_supervised_loss_is_the_mean_over_response_tokens(policy) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    rng = np.random.default_rng(0)
    examples = [([2, 3, 4], [5]), ([3, 3], [7, 1])]
    members = [trajectory("x", prompt, response, rng, None) for prompt, response in examples]
    expected = -np.concatenate([logprobs_of(model, one) for one in members]).mean()
    assert trainer_of(policy).supervised_step(examples)["sft/loss"] == pytest.approx(expected, rel=1e-5)


def test_the_learning_rate_warms_up_linearly(policy, batch) -> None:
    trainer = trainer_of(policy, lr=4e-4, warmup_steps=4)
    rates = [trainer.step(batch, version).metrics["loss/lr"] for version in range(6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_a_bad_step_is_skipped_and_leaves_weights_and_version(policy, batch) -> None:
    batch[0].trajectories[0].behavior_logprobs[-1] = np.nan
    trainer = trainer_of(policy)
    before = [tensor.clone() for _, tensor in trainer.export_weights()]
    assert [trainer.step(batch, 3).skipped, trainer.step(batch, 3).version] == [True, 3]
    assert all(torch.equal(tensor, old) for old, (_, tensor) in zip(before, trainer.export_weights(), strict=True))


def test_a_non_finite_loss_poisons_gradients_that_would_be_finite() -> None:
    weight = torch.ones(3, requires_grad=True)
    poison_if_not_finite(weight.sum() + torch.tensor(float("inf"))).backward()
    assert weight.grad.isnan().all()
    weight.grad = None
    poison_if_not_finite(2.0 * weight.sum()).backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_unscored_and_empty_batches_are_refused(policy) -> None:
    rng = np.random.default_rng(0)
    unscored = GroupPayload(GroupId(4), (trajectory("4/0", [2], [3], rng, None),))
    with pytest.raises(TrainingError, match="4/0 of group 4 has no reward"):
        trainer_of(policy).step([unscored], 0)
    with pytest.raises(TrainingError, match="0 groups"):
        trainer_of(policy).step([], 0)


def test_a_sequence_over_the_token_budget_is_refused(policy, batch) -> None:
    long = trajectory("9/0", [2] * 20, [3] * 20, np.random.default_rng(0), 1.0)
    with pytest.raises(ShapeError, match="max_tokens_per_micro_batch=32"):
        trainer_of(policy, max_tokens=32).step([GroupPayload(GroupId(9), (long,))], 0)


def test_a_loss_token_without_context_is_refused() -> None:
    with pytest.raises(ShapeError, match="nothing precedes it"):
        TrainingSequence(np.array([3, 4]), np.array([0, 1]), np.zeros(2, np.float32))


def test_a_missing_model_is_named(policy) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=/nonexistent/policy does not exist"):
        trainer_of("/nonexistent/policy")


def test_settings_that_cannot_run_together_are_all_named() -> None:
    optimizer = OptimizerConfig(lr=1.0)
    model = MODEL.model_copy(update={"dtype": "bfloat16"})
    trainer = TrainerConfig(
        backend="torch", num_ranks=2, zero_stage=1, max_tokens_per_micro_batch=10, optimizer=optimizer
    )
    keys = [
        "trainer.max_tokens_per_micro_batch=10",
        "trainer.num_ranks=2",
        "trainer.zero_stage=1",
        "model.dtype=bfloat16",
    ]
    assert [violation.split()[0] for violation in trainer_violations(model, trainer)] == keys
    offloaded = TrainerConfig(offload_optimizer=True, max_tokens_per_micro_batch=64, optimizer=optimizer)
    assert [violation.split()[0] for violation in trainer_violations(MODEL, offloaded)] == [
        "trainer.offload_optimizer=true"
    ]


def test_the_same_seed_gives_the_same_tiny_policy(policy, tmp_path) -> None:
    create_policy(MODEL, TOKENIZER, str(tmp_path / "again"), seed=1)
    create_policy(MODEL, TOKENIZER, str(tmp_path / "other"), seed=2)
    weights = Path(policy, "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_published_names_are_those_of_the_checkpoint(policy) -> None:
    from safetensors import safe_open

    with safe_open(Path(policy) / "model.safetensors", framework="pt") as file:
        assert sorted(name for name, _ in trainer_of(policy).export_weights()) == sorted(file.keys())


def test_attention_share_counts_products() -> None:
    # 2 layers × (attention 32·8·2·(4+2) + MLP 3·32·64 + norms 64) + final norm 32; 2·2·4·8 attention products
    assert attention_share(SHAPE) == pytest.approx(2 * 2 * 4 * 8 / (2 * (3072 + 6144 + 64) + 32))
