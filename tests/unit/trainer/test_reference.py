"""Holding the policy to a reference: the divergence as a loss term, and the frozen policy that scores groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.dataflow.versions import Span
from penstock.kernels.portable.logprob import CPU_TILE
from penstock.trainer.algorithms.kl import k2, k3
from penstock.trainer.batches.samples import policy_sequences
from penstock.trainer.models.frozen_policy import FrozenPolicy, OffloadedParameters
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from tests.algorithms import resolved
from tests.live_bytes import LiveBytes
from tests.tiny_policy import SPECIAL_TOKENS, tiny_shape

from .torch_trainer import MODEL, TEMPERATURE, logprobs_of, scored, trainer_of, trajectory

TARGET, REFERENCE = [-1.0, -2.5, -0.1], [-1.0, -1.5, -3.0]


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # k2: ½ (c − r)², gradient c − r
        (k2, [0.0, 0.5, 0.5 * 2.9**2], [0.0, -1.0, 2.9]),
        # k3: exp(r − c) − (r − c) − 1, gradient 1 − exp(r − c)
        (k3, [0.0, np.e - 2.0, np.exp(-2.9) + 1.9], [0.0, 1 - np.e, 1 - np.exp(-2.9)]),
    ],
)
def test_estimators_and_their_gradients(estimator, values: list[float], gradients: list[float]) -> None:
    target = torch.tensor(TARGET, dtype=torch.float64, requires_grad=True)
    terms = estimator(target, torch.tensor(REFERENCE, dtype=torch.float64))
    terms.sum().backward()
    np.testing.assert_allclose(terms.detach().numpy(), values, atol=1e-9)
    np.testing.assert_allclose(target.grad.numpy(), gradients, atol=1e-9)


@pytest.fixture(scope="module")
def other_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("other"))
    create_policy(MODEL, SPECIAL_TOKENS, path, seed=7)
    return path


def scores(path: str, batch: list[GroupPayload], max_tokens: int = 60) -> list[NDArray[np.float32]]:
    policy = FrozenPolicy.load(path, MODEL, "cpu", max_tokens, TEMPERATURE)
    return [policy.logprobs(group) for group in batch]


def test_a_frozen_policy_scores_every_sampled_token(policy: str, batch: list[GroupPayload]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for group, found in zip(batch, scores(policy, batch), strict=True):
        expected = np.concatenate([logprobs_of(model, one) for one in group.trajectories])
        np.testing.assert_allclose(found, expected, atol=2e-5)


BFLOAT16 = MODEL.model_copy(update={"dtype": "bfloat16"})


def test_a_frozen_policy_is_held_in_the_dtype_of_the_policy(policy: str, batch: list[GroupPayload]) -> None:
    frozen = FrozenPolicy.load(policy, BFLOAT16, "cpu", 60, TEMPERATURE)
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {torch.bfloat16}
    frequencies = [one for name, one in frozen.model.named_buffers() if "inv_freq" in name]
    assert {one.dtype for one in frequencies} == {torch.float32}, "rounded, they would turn late positions by radians"
    for group, expected in zip(batch, scores(policy, batch), strict=True):
        found = frozen.logprobs(group)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=0.05)


def test_a_frozen_policy_makes_no_matrix_of_tokens_times_vocabulary(tmp_path: Path) -> None:
    vocab_size, rng = 4096, np.random.default_rng(0)
    model = BFLOAT16.model_copy(update={"shape": tiny_shape(vocab_size)})
    create_policy(model, SPECIAL_TOKENS, str(tmp_path), seed=0)
    members = [trajectory(str(n), [2, 3], rng.integers(2, vocab_size, 25).tolist(), rng, None) for n in range(2)]
    frozen = FrozenPolicy.load(str(tmp_path), model, "cpu", 60, TEMPERATURE)
    with LiveBytes() as live:
        live.reset_peak()
        frozen.logprobs(GroupPayload(GroupId(0), tuple(members)))
    weights = max(parameter.numel() for parameter in frozen.model.parameters())
    assert live.largest <= max(weights, 50 * CPU_TILE.vocab_size) < 50 * vocab_size


def test_without_a_coefficient_the_reference_has_no_effect(
    policy: str, other_policy: str, batch: list[GroupPayload]
) -> None:
    held, free = trainer_of(policy), trainer_of(policy)
    held.step(scored(batch, scores(other_policy, batch)), 0)
    free.step(batch, 0)
    assert torch.equal(weights_after(held), weights_after(free))


def weights_after(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()])


def test_a_reference_equal_to_the_policy_changes_nothing(policy: str, batch: list[GroupPayload]) -> None:
    held, free = trainer_of(policy, kl_coefficient=1.0), trainer_of(policy)
    report = held.step(scored(batch, scores(policy, batch)), 0)
    free.step(batch, 0)
    assert report.metrics["loss/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert float((weights_after(held) - weights_after(free)).abs().max()) < 1e-4


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_policy_is_drawn_to_the_reference(
    estimator: str, policy: str, other_policy: str, batch: list[GroupPayload]
) -> None:
    trainer = trainer_of(policy, kl_coefficient=100.0, kl_estimator=estimator, correction="none")
    references = scores(other_policy, batch)
    divergence = [trainer.step(scored(batch, references), v).metrics["loss/reference_kl"] for v in range(30)]
    assert divergence[-1] < 0.5 * divergence[0]


def test_a_streamed_batch_is_held_alike(policy: str, other_policy: str, batch: list[GroupPayload]) -> None:
    references = scores(other_policy, batch)
    whole, streamed = (trainer_of(policy, kl_coefficient=0.5) for _ in range(2))
    expected = whole.step(scored(batch, references), 0)
    streamed.accumulate(scored(batch[:2], references[:2]), 0)
    report = streamed.step(scored(batch[2:], references[2:]), 0)
    assert report.metrics["loss/reference_kl"] == pytest.approx(expected.metrics["loss/reference_kl"], rel=1e-5)
    assert report.metrics["loss/policy"] == pytest.approx(expected.metrics["loss/policy"], rel=1e-4)
    assert report.metrics["loss/grad_norm"] == pytest.approx(expected.metrics["loss/grad_norm"], rel=1e-4)


def test_trimmed_tokens_take_their_logprobs_with_them(policy: str, batch: list[GroupPayload]) -> None:
    def age(one):
        return replace(one, spans=(Span(3, 1), Span(5, one.num_sampled_tokens - 1))) if len(one.token_ids) > 8 else one

    aged = [GroupPayload(group.group_id, tuple(map(age, group.trajectories))) for group in batch]
    references = scores(policy, aged)
    whole = policy_sequences(scored(aged, references), resolved(), 30)
    trimmed = policy_sequences(scored(aged, references, min_versions=[4] * 3), resolved(), 30)
    pairs = [(a, b) for a, b in zip(whole, trimmed, strict=True) if 0 < len(b.targets) < len(a.targets)]
    assert pairs
    for before, after in pairs:
        np.testing.assert_array_equal(after.reference_logprobs, before.reference_logprobs[1:])


def test_missing_or_misfitting_logprobs_are_refused(policy: str, batch: list[GroupPayload]) -> None:
    trainer = trainer_of(policy, kl_coefficient=0.1)
    with pytest.raises(TrainingError, match=r"kl\.coefficient=0\.1, but the groups came without"):
        trainer.step(batch, 0)
    with pytest.raises(ShapeError, match="reference logprobs for"):
        trainer.step(scored(batch, [one[:-1] for one in scores(policy, batch)]), 0)


def test_a_reference_that_does_not_exist_is_named(tmp_path: Path) -> None:
    from penstock.dataflow.errors import ConfigError

    with pytest.raises(ConfigError, match="does not exist"):
        FrozenPolicy.load(str(tmp_path / "nothing"), MODEL, "cpu", 100, 1.0)


def test_an_offloaded_policy_has_its_parameters_on_the_device_while_it_is_used_only(
    policy: str, batch: list[GroupPayload]
) -> None:
    """On a CPU the device is main memory too; its copies are other tensors, and their bytes are counted."""
    expected = scores(policy, batch)
    with LiveBytes() as live:
        frozen = FrozenPolicy.load(policy, MODEL, "cpu", 60, TEMPERATURE, offloads=True)
        offloaded = frozen.offloaded
        assert offloaded is not None
        num_bytes = sum(one.untyped_storage().nbytes() for one in frozen.model.parameters())  # tied ones once
        host = {one.data_ptr() for one in frozen.model.parameters()}
        at_rest = live.now
        for _ in range(2):
            found = [frozen.logprobs(group) for group in batch]
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True)), "bit for bit"
            assert offloaded.is_loaded
            assert not host & {one.data_ptr() for one in frozen.model.parameters()}, "all of them are on the device"
            assert live.now == at_rest + num_bytes, "one copy each, also for several groups in a row"
            offloaded.rest()
            assert {one.data_ptr() for one in frozen.model.parameters()} == host
            assert live.now == at_rest, "what the device had is free"


def test_only_buffers_of_an_offloaded_policy_stay_on_the_device() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("frequencies", torch.ones(2), persistent=False)

    model = torch.nn.Sequential(Block(), Block())
    OffloadedParameters(model, torch.device("meta"))  # a device that is not main memory, without elements
    assert {one.device.type for one in model.buffers()} == {"meta"}
    assert {one.device.type for one in model.parameters()} == {"cpu"}
