"""Every algorithm by kind and name: its formula, its source and its function. Imports no torch.

A new loss is a function in losses.py, an entry here, a settings class in config.py if it has settings, and
conf/algorithm/loss/NAME.yaml. Your own loss needs none of them: `algorithm/loss=custom
algorithm.loss.function=pkg.module:function`.

`penstock algorithms` prints the entries, docs/paper_index.md lists them, the checks of a configuration use them, and
`load` returns the function.

Symbols: trajectory i of a group of G with reward R_i; sampled token t, n_i of them; N sequences of a batch;
behavior, proximal, target, reference logprobs b, p, c, r; ρ = exp(c − p); w = exp(p − b); sg = stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import load_object

Kind = Literal[
    "advantage", "loss", "correction", "kl", "entropy", "controller", "aggregation", "proximal", "reward_shaping",
    "token_weighting", "auxiliary_loss",
]  # fmt: skip
Level = Literal["token", "sequence", "pair", "group", "batch"]
"""The data from which one number is computed. Losses and corrections of `batch` have a function in selection.py."""

KINDS: tuple[Kind, ...] = (
    "advantage", "loss", "correction", "kl", "entropy", "controller", "aggregation", "proximal", "reward_shaping",
    "token_weighting", "auxiliary_loss",
)  # fmt: skip
_PACKAGE = "penstock.trainer.algorithms"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One entry.

    Attributes:
        formula: One line, in the symbols of the module.
        source: arXiv id, or author and year.
        function: `module:name` within trainer/algorithms, or the import path of a user's own.
        level: The data from which one number is computed; of a correction with a weight, one weight.
        takes_weight: Of a loss: False if it uses the behavior logprobs itself, or needs no correction.
        has_ratio: Of a loss: whether it contains ρ, which at proximal=behavior is the ratio to the behavior policy.
        needs_advantages: Of a loss: without advantages (or pairs) its gradient is 0.
        is_weight: Of a correction: whether it has a weight (at most one in a chain); the others only mask.
    """

    kind: Kind
    name: str
    formula: str
    source: str
    function: str
    level: Level = "token"
    takes_weight: bool = True
    has_ratio: bool = True
    needs_advantages: bool = True
    is_weight: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own function, named by its import path."""
        return self.name == self.function

    @property
    def file(self) -> str:
        """Where it is computed, relative to the repository."""
        module = self.function.partition(":")[0]
        return self.function if self.is_own else PurePosixPath("trainer", "algorithms", f"{module}.py").as_posix()

    def load(self) -> Callable[..., Any]:
        """The function.

        Raises:
            ConfigError: If the import path does not resolve to something callable.
        """
        key = f"algorithm.{self.kind}"
        target = load_object(self.function if self.is_own else f"{_PACKAGE}.{self.function}", key)
        if not callable(target):
            raise ConfigError([f"{key}={self.name!r} is not callable, but a {type(target).__name__}. Name a function."])
        return target


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm("advantage", "grpo", "A_i = (R_i − mean R) / (std R + ε)", "2402.03300", "advantages:grpo", "group"),
    Algorithm("advantage", "dr_grpo", "A_i = R_i − mean R", "2503.20783", "advantages:dr_grpo", "group"),
    Algorithm("advantage", "rloo", "A_i = R_i − mean_{j≠i} R_j", "2402.14740", "advantages:rloo", "group"),
    Algorithm("advantage", "maxrl", "A_i = (R_i − mean R) / mean R, R ≥ 0", "2602.02710", "advantages:maxrl", "group"),
    Algorithm("advantage", "pass_at_k", "A_i = max R − max_{j≠i} R_j: k = G, leave one out", "2503.19595",
              "advantages:pass_at_k", "group"),
    Algorithm("advantage", "reinforce_pp", "A_{i,t} = R_i − β Σ_{s≥t} k1_s, whitened over all loss tokens of the batch",
              "2501.03262", "advantages:reinforce_pp", "batch"),
    Algorithm("advantage", "reinforce_pp_baseline", "A_{i,t} = R_i − mean R − β Σ_{s≥t} k1_s, whitened likewise",
              "2501.03262", "advantages:reinforce_pp_baseline", "batch"),
    Algorithm("advantage", "gae",
              "δ_t = r_t + γ V_{t+1} − V_t; A_t = δ_t + γλ A_{t+1}, over sampled tokens; whitened likewise",
              "1506.02438", "advantages:gae", "token"),
    Algorithm("loss", "ppo_clip", "max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))", "1707.06347", "losses:ppo_clip"),
    Algorithm("loss", "dual_clip", "ppo_clip; for A < 0: min(that, −A c_dual)", "1912.09729",
              "losses:dual_clip"),
    Algorithm("loss", "gspo", "ppo_clip on s_i = exp(mean_t(c − p)), one term per sequence", "2507.18071",
              "losses:gspo", "sequence"),
    Algorithm("loss", "gspo_token", "ppo_clip on sg(s_i)·exp(c − sg(c))", "2507.18071",
              "losses:gspo_token", "sequence"),
    Algorithm("loss", "gmpo", "−A exp(mean_t d), d = c − p, ≤ ε_hi for A > 0, ≥ −ε_lo for A < 0; one term per sequence",
              "2507.20673", "losses:gmpo", "sequence"),
    Algorithm("loss", "clip_cov", "ppo_clip; 0 at tokens drawn of those with lo < (A − mean A)(p − mean p) < hi",
              "2505.22617", "losses:clip_cov", "batch"),
    Algorithm("loss", "kl_cov", "−A ρ; + β (ρ − log ρ − 1) at the tokens of largest (A − mean A)(p − mean p)",
              "2505.22617", "losses:kl_cov", "batch"),
    Algorithm("loss", "cispo", "−sg(min(ρ, 1+ε_hi)) A c", "2506.13585", "losses:cispo"),
    Algorithm("loss", "reinforce", "−A c", "Williams, 1992", "losses:reinforce", has_ratio=False),
    Algorithm("loss", "sapo", "−(4/τ) σ(τ(ρ − 1)) A, τ⁺ for A > 0, else τ⁻", "2511.20347", "losses:sapo"),
    Algorithm("loss", "dppo", "−keep A min(exp(c − b), cap); dropped where A pushes π − μ beyond ±δ", "2602.04879",
              "losses:dppo", takes_weight=False),
    Algorithm("loss", "topr", "A > 0: −A c; else −sg(min(exp(Σ_t(c − b)), 1)) A c", "2503.14286",
              "losses:topr", "sequence", takes_weight=False),
    Algorithm("loss", "online_dpo", "−(1 − ε) log σ(β Δ) − ε log σ(−β Δ), Δ = (Σc⁺ − Σr⁺) − (Σc⁻ − Σr⁻)", "2402.04792",
              "losses:online_dpo", "pair", takes_weight=False, has_ratio=False),
    Algorithm("loss", "ipo", "(Δ − 1/(2β))², Δ of means over tokens or of sums", "2310.12036",
              "losses:ipo", "pair", takes_weight=False, has_ratio=False),
    Algorithm("loss", "distill", "−sg(log π_teacher − c) c", "2306.13649",
              "losses:distill", has_ratio=False, needs_advantages=False),
    Algorithm("loss", "sft", "−c", "–", "losses:sft", takes_weight=False, needs_advantages=False),
    Algorithm("loss", "value", "½ max((V − ret)², (clip(V, V_old ± ε_v) − ret)²)", "2005.12729",
              "losses:value", takes_weight=False, needs_advantages=False),
    Algorithm("correction", "decoupled", "weight w; masked where w > cap", "2505.24298", "corrections:decoupled",
              is_weight=True),
    Algorithm("correction", "tis_token", "weight clamp(w, lo, C)", "Ionides, 2008", "corrections:tis_token",
              is_weight=True),
    Algorithm("correction", "tis_seq", "weight clamp(exp(Σ_t(p − b)), lo, C)", "Ionides, 2008", "corrections:tis_seq",
              "sequence", is_weight=True),
    Algorithm("correction", "mis_token", "weight w; masked outside lo ≤ w ≤ hi", "2510.18855",
              "corrections:mis_token", is_weight=True),
    Algorithm("correction", "mis_seq_geo", "sequence kept iff lo ≤ exp(mean_t(p − b)) ≤ hi", "Liu et al., 2025",
              "corrections:mis_seq_geo", "sequence"),
    Algorithm("correction", "opsm", "sequence masked iff A < 0 and mean_t(b − c) > δ", "2512.02556",
              "corrections:opsm", "sequence"),
    Algorithm("correction", "f_tis", "tis_token; sequence masked iff A < 0 and mean_t(b − c) > KL limit", "2605.22537",
              "corrections:f_tis", is_weight=True),
    Algorithm("correction", "veto", "sequence masked iff any w < min_weight", "Liu et al., 2025", "corrections:veto",
              "sequence"),
    Algorithm("correction", "m2po", "masked: largest (p − b)² of tokens with A (p − b) > 0, until their mean is ≤ τ",
              "2510.01161", "corrections:m2po", "batch"),
    Algorithm("kl", "k1", "c − r (in the reward only)", "Schulman, 2020", "kl:k1"),
    Algorithm("kl", "k2", "½ (c − r)²; its gradient is that of KL(π‖r)", "2506.09477", "kl:k2"),
    Algorithm("kl", "k3", "exp(d) − d − 1, d = clamp(r − c, ±10); its gradient is that of KL(r‖π)",
              "2506.09477", "kl:k3"),
    Algorithm("entropy", "entropy_bonus", "−η H_t, H_t = −Σ_v π_v log π_v over what can be sampled; exact gradient",
              "1602.01783", "controllers:entropy_bonus"),
    Algorithm("controller", "adaptive_entropy", "η ± Δ if H < H* or not, within [0, η_max]; no bonus while H > H*",
              "2505.22312", "controllers:next_entropy_coefficient", "batch"),
    Algorithm("controller", "adaptive_kl", "β (1 + K clip(KL / KL* − 1, ±0.2))", "1909.08593",
              "controllers:next_kl_coefficient", "batch"),
    Algorithm("aggregation", "token_mean", "weight 1 / Σ n_i", "2503.14476", "aggregation:token_mean"),
    Algorithm("aggregation", "seq_mean_token_mean", "weight 1 / (N n_i)", "2402.03300",
              "aggregation:seq_mean_token_mean"),
    Algorithm("aggregation", "prompt_mean", "weight 1 / (number of groups · Σ n_j of its group)", "2510.13786",
              "aggregation:prompt_mean"),
    Algorithm("aggregation", "seq_mean_token_sum", "weight 1 / N", "2503.20783", "aggregation:seq_mean_token_sum"),
    Algorithm("aggregation", "constant_length", "weight 1 / (N · max_new_tokens)", "2503.20783",
              "aggregation:constant_length"),
    Algorithm("proximal", "target", "p = sg(c): ρ ≡ 1, clips do nothing", "–", "proximal:target"),
    Algorithm("proximal", "behavior", "p = b: w ≡ 1, ρ is the whole correction", "2506.13585", "proximal:behavior"),
    Algorithm("proximal", "recompute", "p by a forward at the start of the step", "2110.00641", "proximal:recompute"),
    Algorithm("proximal", "interpolate", "p = b + α(sg(c) − b), α = (v_prox − v_token) / (v_prox + 1 − v_token)",
              "2512.06547", "proximal:interpolate"),
    Algorithm("reward_shaping", "overlong_penalty", "0 up to L_max − L_cache, linear to −1 at L_max, −1 beyond",
              "2503.14476", "advantages:overlong_penalty"),
    Algorithm("reward_shaping", "bootstrap", "γ V of the state at the cut is added to the reward of a cut answer",
              "1712.00378", "advantages:gae"),
    Algorithm("reward_shaping", "reward_weights", "A = Σ_h weight_h · A(R^h): each head normalised in its group",
              "2601.05242", "advantages:per_head", "group"),
    Algorithm("reward_shaping", "teacher_coefficient", "A + coefficient · (log π_teacher − sg(c))", "2306.13649",
              "advantages:with_teacher"),
    Algorithm("token_weighting", "staleness_decay", "term · decay^staleness", "–", "aggregation:staleness_factors"),
    Algorithm("token_weighting", "entropy_top_share", "only the ⌈q n_i⌉ tokens of highest entropy of each sequence",
              "2506.01939", "aggregation:is_low_entropy", "sequence"),
    Algorithm("auxiliary_loss", "nll_coefficient",
              "+ coefficient · mean over tokens of passing answers of (−c); of pairs: mean over pairs of mean_t(−c⁺)",
              "2404.19733", "losses:negative_logprob", needs_advantages=False),
)  # fmt: skip
_BY_NAME = {(algorithm.kind, algorithm.name): algorithm for algorithm in ALGORITHMS}


def find(kind: Kind, name: str) -> Algorithm:
    """The entry of that kind and name; an import path is assumed to work on tokens, or groups."""
    if algorithm := _BY_NAME.get((kind, name)):
        return algorithm
    assert is_import_path(name), f"{kind} {name!r} passed validation"
    return Algorithm(kind, name, "the user's own", "–", name, "group" if kind == "advantage" else "token")


def names(kind: Kind) -> list[str]:
    """Names of one kind, in the order of the catalog."""
    return [algorithm.name for algorithm in ALGORITHMS if algorithm.kind == kind]


def is_import_path(name: str) -> bool:
    """`pkg.mod:name` or `pkg.mod.name`."""
    return "." in name or ":" in name


def known(kind: Kind, *, or_import_path: bool = False) -> Callable[[str], str]:
    """A validator of a configuration key that names one of `kind`; the error reads like that of a Literal."""

    def check(name: str) -> str:
        if (kind, name) not in _BY_NAME and not (or_import_path and is_import_path(name)):
            own = ["an import path"] if or_import_path else []
            expected = ", ".join([*names(kind), *own])
            raise PydanticCustomError("literal_error", "must be one of {expected}", {"expected": expected})
        return name

    return check
