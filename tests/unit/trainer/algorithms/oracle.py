"""The definitions again, token by token with plain loops in extended precision, knowing nothing of the code under test.

A loss here is a function of `c` (which carries the gradient) and `frozen` (the same numbers, where the definition says
stop-gradient), so that its gradient by central differences is that of the definition. In 80-bit floats differences with
h = 1e-6 are good to 1e-11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Real = np.longdouble


@dataclass(frozen=True)
class Data:
    """One micro-batch: flat arrays, and which sequence each token is of."""

    c: np.ndarray
    p: np.ndarray
    b: np.ndarray
    r: np.ndarray
    advantage: np.ndarray
    segments: np.ndarray
    num_segments: int
    pairs: list[tuple[int, int]] = field(default_factory=list)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    selected: dict[str, np.ndarray] = field(default_factory=dict)

    def tokens_of(self, segment: int) -> list[int]:
        return [t for t in range(len(self.c)) if self.segments[t] == segment]


def exp20(x):
    return np.exp(min(max(x, Real(-20)), Real(20)))


def clip(x, low, high):
    return min(max(x, low), high)


def surrogate(ratio, a, low, high):
    return max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high))


def ppo_clip(c, frozen, d, k):
    return [surrogate(exp20(c[t] - d.p[t]), d.advantage[t], k.clip_low, k.clip_high) for t in range(len(c))]


def dual_clip(c, frozen, d, k):
    terms = ppo_clip(c, frozen, d, k)
    a = d.advantage
    return [min(terms[t], -a[t] * Real(k.dual_clip)) if a[t] < 0 else terms[t] for t in range(len(c))]


def mean(values):
    return sum(values, Real(0)) / max(len(values), 1)


def gspo(c, frozen, d, k):
    terms = [Real(0)] * len(c)
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        ratio = exp20(mean([c[t] - d.p[t] for t in own]))
        for t in own:
            terms[t] = surrogate(ratio, mean([d.advantage[s] for s in own]), k.clip_low, k.clip_high)
    return terms


def gspo_token(c, frozen, d, k):
    terms = [Real(0)] * len(c)
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        s = exp20(mean([frozen[t] - d.p[t] for t in own]))
        for t in own:
            terms[t] = surrogate(s * np.exp(c[t] - frozen[t]), d.advantage[t], k.clip_low, k.clip_high)
    return terms


def gmpo(c, frozen, d, k):
    terms = [Real(0)] * len(c)
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        a = mean([d.advantage[t] for t in own])
        logs = [c[t] - d.p[t] for t in own]
        if a > 0:
            logs = [min(one, Real(k.gmpo_high)) for one in logs]
        if a < 0:
            logs = [max(one, -Real(k.gmpo_low)) for one in logs]
        for t in own:
            terms[t] = -a * exp20(mean(logs))
    return terms


def clip_cov(c, frozen, d, k):
    terms = ppo_clip(c, frozen, d, k)
    return [Real(0) if d.selected["clip_cov"][t] else terms[t] for t in range(len(c))]


def kl_cov(c, frozen, d, k):
    terms = []
    for t in range(len(c)):
        log_ratio = clip(c[t] - d.p[t], Real(-10), Real(10))
        divergence = Real(k.kl_cov_coefficient) * (np.exp(log_ratio) - log_ratio - 1)
        terms.append(-d.advantage[t] * exp20(c[t] - d.p[t]) + (divergence if d.selected["kl_cov"][t] else 0))
    return terms


def cispo(c, frozen, d, k):
    terms = []
    for t in range(len(c)):
        weight = min(exp20(frozen[t] - d.p[t]), 1 + Real(k.clip_high))
        if k.cispo_low is not None:
            weight = max(weight, 1 - Real(k.cispo_low))
        terms.append(-weight * d.advantage[t] * c[t])
    return terms


def reinforce(c, frozen, d, k):
    return [-d.advantage[t] * c[t] for t in range(len(c))]


def sapo(c, frozen, d, k):
    terms = []
    for t in range(len(c)):
        tau = Real(k.sapo_tau_positive if d.advantage[t] > 0 else k.sapo_tau_negative)
        ratio = exp20(c[t] - d.p[t])
        terms.append(-(4 / tau) / (1 + np.exp(-tau * (ratio - 1))) * d.advantage[t])
    return terms


def dppo(c, frozen, d, k):
    terms = []
    for t in range(len(c)):
        shift = np.exp(frozen[t]) - np.exp(d.b[t])
        a = d.advantage[t]
        dropped = (a > 0 and shift > k.dppo_delta) or (a <= 0 and shift < -k.dppo_delta)
        weight = min(exp20(frozen[t] - d.b[t]), Real(k.dppo_cap))
        terms.append(Real(0) if dropped else -a * weight * np.exp(c[t] - frozen[t]))
    return terms


def topr(c, frozen, d, k):
    terms = [Real(0)] * len(c)
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        taper = min(exp20(sum([frozen[t] - d.b[t] for t in own], Real(0))), Real(1))
        for t in own:
            terms[t] = -(1 if d.advantage[t] > 0 else taper) * d.advantage[t] * c[t]
    return terms


def total(values):
    return sum(values, Real(0))


def of_pairs(c, d, of_member, of_margin):
    """Every pair's loss, half of it at each token of either member."""
    terms = [Real(0)] * len(c)
    for better, worse in d.pairs:
        delta = of_member([c[t] - d.r[t] for t in d.tokens_of(better)])
        delta -= of_member([c[t] - d.r[t] for t in d.tokens_of(worse)])
        for t in d.tokens_of(better) + d.tokens_of(worse):
            terms[t] += of_margin(delta) / 2
    return terms


def online_dpo(c, frozen, d, k):
    of_member, wrong = {"mean": mean, "sum": total}[k.dpo_length], Real(k.label_smoothing)

    def loss(delta):
        x = Real(k.pair_beta) * delta
        return (1 - wrong) * np.log1p(np.exp(-x)) + wrong * np.log1p(np.exp(x))

    return of_pairs(c, d, of_member, loss)


def ipo(c, frozen, d, k):
    of_member = {"mean": mean, "sum": total}[k.ipo_length]
    return of_pairs(c, d, of_member, lambda delta: (delta - 1 / (2 * Real(k.pair_beta))) ** 2)


def sft(c, frozen, d, k):
    return [-one for one in c]


def distill(c, frozen, d, k):
    return [-(d.extra["teacher"][t] - frozen[t]) * c[t] for t in range(len(c))]


def value(v, frozen, d, k):
    terms = []
    for t in range(len(v)):
        old, target = d.extra["old_values"][t], d.extra["returns"][t]
        bounded = clip(v[t], old - Real(k.value_clip), old + Real(k.value_clip))
        terms.append(max((v[t] - target) ** 2, (bounded - target) ** 2) / 2)
    return terms


LOSSES: dict[str, Callable] = {
    one.__name__: one
    for one in (
        ppo_clip, dual_clip, gspo, gspo_token, gmpo, clip_cov, kl_cov, cispo, reinforce, sapo, dppo, topr, online_dpo,
        ipo, distill, sft, value,
    )
}  # fmt: skip


def corrected(name: str, d: Data, k) -> list[tuple[np.longdouble, bool]]:
    """(weight, is it masked) of each token, by one correction."""
    result = [(Real(1), False)] * len(d.c)
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        log_w = [d.p[t] - d.b[t] for t in own]
        drift = mean([d.b[t] - d.c[t] for t in own])
        bad = mean([d.advantage[t] for t in own]) < 0
        for t in own:
            w = exp20(d.p[t] - d.b[t])
            result[t] = {
                "none": (Real(1), False),
                "decoupled": (w, w > k.correction_cap),
                "tis_token": (clip(w, Real(k.tis_low), Real(k.tis_cap)), False),
                "tis_seq": (clip(exp20(sum(log_w, Real(0))), Real(k.tis_low), Real(k.tis_cap)), False),
                "mis_token": (w, not k.mis_low <= w <= k.mis_high),
                "mis_seq_geo": (Real(1), not k.geo_low <= exp20(mean(log_w)) <= k.geo_high),
                "opsm": (Real(1), bad and drift > k.opsm_delta),
                "f_tis": (min(w, Real(k.tis_cap)), bad and drift > k.f_tis_max_kl),
                "veto": (Real(1), any(exp20(one) < k.veto_min for one in log_w)),
                "m2po": (Real(1), bool(d.selected["m2po"][t]) if d.selected else False),
            }[name]
    return result


def gradient(name: str, d: Data, k, weights: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """Of Σ weight · term, by central differences; term by term, so that huge constant ones cancel exactly."""
    found = np.zeros_like(d.c)
    for t in range(len(d.c)):
        up, down = d.c.copy(), d.c.copy()
        up[t] += Real(h)
        down[t] -= Real(h)
        terms = zip(LOSSES[name](up, d.c, d, k), LOSSES[name](down, d.c, d, k), weights, strict=True)
        found[t] = sum(((high - low) * weight for high, low, weight in terms), Real(0)) / (2 * Real(h))
    return found
