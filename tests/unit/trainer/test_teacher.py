"""On-policy distillation: a frozen teacher of any size says how likely it finds what the policy sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError, TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.models.value_model import load_value_model
from penstock.weights.model_config import ModelConfig
from tests.tiny_policy import SPECIAL_TOKENS

from .torch_trainer import MODEL, TEMPERATURE, VOCAB, scored, trainer_of

DISTILL = {"loss": "distill", "correction": "none"}


def other_model(path: str, **shape) -> str:
    changed = ModelConfig(max_context_tokens=32, shape=MODEL.shape.model_copy(update=shape))
    create_policy(changed, SPECIAL_TOKENS, path, seed=7, initializer_range=0.2)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wider and deeper than the student."""
    size = {"hidden_size": 2 * MODEL.shape.hidden_size, "num_layers": MODEL.shape.num_layers + 1}
    return other_model(str(tmp_path_factory.mktemp("teacher")), **size)


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    return other_model(str(tmp_path_factory.mktemp("foreign")), vocab_size=VOCAB + 3)


def teacher_logprobs(teacher: str, batch: list[GroupPayload]) -> list[np.ndarray]:
    policy = FrozenPolicy.load(teacher, MODEL, "cpu", 60, TEMPERATURE)
    return [policy.logprobs(group) for group in batch]


def logprobs(model, one) -> torch.Tensor:
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    positions = np.flatnonzero(one.loss_mask)
    scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE, -1)
    return scores[positions - 1, one.token_ids[positions]]


def test_a_step_equals_a_plain_loop_over_both_models(policy, teacher, batch) -> None:
    """−sg(log τ − c) c, token mean; ε of AdamW far above the gradient, so that weights compare gradients."""
    from transformers import AutoModelForCausalLM

    student, its_teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (policy, teacher)
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    start = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    members = [one for group in batch for one in group.trajectories]
    divergence = 0.0
    for one in members:
        c = logprobs(student, one)
        with torch.no_grad():
            gap = logprobs(its_teacher, one) - c
            divergence += float((gap.double().exp() - gap.double() - 1).sum())
        (-(gap * c).sum() / sum(one.num_sampled_tokens for one in members)).backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    trainer = trainer_of(policy, 60, lr=1.0, adam_epsilon=1.0, **DISTILL)
    report = trainer.step(scored(batch, teachers=teacher_logprobs(teacher, batch)), 0)
    moved = error = 0.0
    for (name, expected), (_, found) in zip(student.named_parameters(), trainer.export_weights(), strict=True):
        moved += float((expected.detach() - start[name]).square().sum())
        error += float((expected.detach() - found).square().sum())
    assert error**0.5 < 1e-4 * moved**0.5
    num_tokens = sum(one.num_sampled_tokens for one in members)
    assert report.metrics["loss/teacher_kl"] == pytest.approx(divergence / num_tokens, rel=1e-4)


def test_the_policy_comes_to_agree_with_its_teacher(policy, teacher, batch) -> None:
    trainer, theirs = trainer_of(policy, 200, lr=3e-3, **DISTILL), teacher_logprobs(teacher, batch)
    divergence = [trainer.step(scored(batch, teachers=theirs), v).metrics["loss/teacher_kl"] for v in range(20)]
    assert divergence[-1] < 0.5 * divergence[0]


def test_without_a_teacher_there_is_no_step_and_no_metric(policy, batch) -> None:
    with pytest.raises(TrainingError, match="came without logprobs of a teacher"):
        trainer_of(policy, **DISTILL).step(batch, 0)
    assert "loss/teacher_kl" not in trainer_of(policy).step(batch, 0).metrics


def test_models_of_another_vocabulary_are_refused_with_both_numbers(other_vocabulary) -> None:
    numbers = f"has {VOCAB + 3} tokens, the policy's .* {VOCAB}: "
    with pytest.raises(ConfigError, match=numbers):
        FrozenPolicy.load(other_vocabulary, MODEL, "cpu", 60, 1.0)
    with pytest.raises(ConfigError, match=numbers):
        load_value_model(other_vocabulary, MODEL, gradient_checkpointing=False)
