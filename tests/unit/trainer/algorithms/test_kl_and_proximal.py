"""Divergence estimators and the proximal policy: hand-worked values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.proximal import ProximalInputs

C, R = np.array([-1.0, -2.5, -0.1, -30.0]), np.array([-1.0, -1.5, -3.0, -0.5])


@pytest.mark.parametrize(
    ("name", "values", "gradients"),
    [
        ("k1", C - R, np.ones(4)),
        ("k2", 0.5 * (C - R) ** 2, C - R),
        # beyond the clamp k3 is constant
        ("k3", np.exp(np.minimum(R - C, 10)) - np.minimum(R - C, 10) - 1, np.where(R - C > 10, 0.0, 1 - np.exp(R - C))),
    ],
)
def test_value_and_gradient(name: str, values: np.ndarray, gradients: np.ndarray) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        target = torch.tensor(C, dtype=dtype, requires_grad=True)
        terms = find("kl", name).load()(target, torch.tensor(R, dtype=dtype))
        terms.sum().backward()
        np.testing.assert_allclose(terms.detach(), values, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(target.grad, gradients, rtol=tolerance, atol=tolerance)


def test_k3_never_pushes_away_from_the_reference_and_never_explodes() -> None:
    """At any distance: the sign of c − r or 0, at most e^10; where exp alone was clamped, r − c > 20 had the other."""
    near = np.array([-9.999, -3.0, -1e-3, 0.0, 1e-3, 0.7, 9.999])
    far = np.array([-90.0, -20.1, -10.001, 10.001, 19.9, 20.1, 25.0, 90.0])
    d = np.concatenate([near, far])
    values = np.concatenate([np.expm1(near) - near, np.exp(np.sign(far) * 10) - np.sign(far) * 10 - 1])
    slopes = np.concatenate([-np.expm1(near), np.zeros(len(far))])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        target = torch.full((len(d),), -95.0, dtype=dtype, requires_grad=True)
        terms = find("kl", "k3").load()(target, target.detach() + torch.tensor(d, dtype=dtype))
        terms.sum().backward()
        # In float32 −95 + 9.999 is rounded, by 4e-6 at most, and e^10 multiplies it.
        np.testing.assert_allclose(terms.detach(), values, rtol=20 * tolerance, atol=20 * tolerance)
        np.testing.assert_allclose(target.grad, slopes, rtol=20 * tolerance, atol=20 * tolerance)
        assert (target.grad.numpy() * -d >= 0).all()


def test_expected_gradients_are_those_of_the_divergences() -> None:
    """Over a whole small vocabulary: E_π[∇k2] = ∇KL(π‖r), E_π[∇k3] = ∇KL(r‖π), E_π[∇k1] = 0."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=7), requires_grad=True)
    reference = torch.log_softmax(torch.tensor(rng.normal(size=7)), -1)
    policy = torch.log_softmax(logits, -1)
    reverse = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)[0]
    for name, expected in (("k2", reverse), ("k3", forward), ("k1", torch.zeros(7))):
        terms = find("kl", name).load()(policy, reference)
        sampled = torch.autograd.grad((policy.exp().detach() * terms).sum(), logits, retain_graph=True)[0]
        np.testing.assert_allclose(sampled, expected, atol=1e-9)


class TestProximal:
    TARGET = torch.tensor([-1.0, -2.0, -0.5, -0.7], dtype=torch.float64)
    BEHAVIOR = torch.tensor([-1.3, -1.0, -0.5, -2.7], dtype=torch.float64)

    def p(self, name: str, **inputs) -> list[float]:
        return find("proximal", name).load()(ProximalInputs(self.TARGET, self.BEHAVIOR, **inputs)).tolist()

    def test_target_and_behavior_and_recompute(self) -> None:
        other = torch.tensor([-9.0, -8.0, -7.0, -6.0], dtype=torch.float64)
        assert self.p("target") == self.TARGET.tolist()
        assert self.p("behavior") == self.BEHAVIOR.tolist()
        assert self.p("recompute", recomputed=other) == other.tolist()

    def test_interpolate_goes_from_behavior_towards_the_target_with_staleness(self) -> None:
        staleness = 5 - torch.tensor([5, 4, 2, 1])
        # α = (5 − v) / (6 − v) = 0, 1/2, 3/4, 4/5
        expected = [-1.3, -1.5, -0.5, -2.7 + 0.8 * 2.0]
        found = self.p("interpolate", staleness=staleness, is_first_update=False)
        np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_interpolate_starts_a_batch_at_the_target(self) -> None:
        assert self.p("interpolate", staleness=torch.tensor([0, 1, 3, 4])) == self.TARGET.tolist()
