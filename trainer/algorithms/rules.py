"""Checks of the algorithm section: combinations that cannot work, each with the reason. Imports no torch.

Checks that depend on other sections (streaming, expiry, token budget) are in platform/checks/algorithm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from penstock.trainer.algorithms.advantages import GaeConfig
from penstock.trainer.algorithms.aggregation import SEQUENCE_MEANS
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.config import AlgorithmConfig

_UNUSED_ADVANTAGE, _UNUSED_AGGREGATION = "grpo", "token_mean"
"""The defaults, which a configuration contains even if nothing uses them."""


def algorithm_violations(config: AlgorithmConfig) -> list[str]:
    """Return one sentence per violation; empty if the algorithm is valid."""
    return [
        *_of_corrections(config),
        *_of_terms(config),
        *config.loss_entry.refused(config),
        *_of_rewards(config),
        *_of_unused_settings(config),
    ]


def _of_corrections(config: AlgorithmConfig) -> Iterator[str]:
    """Check that there is at most one weight, that it is not counted twice, and that the loss can take it."""
    chain, loss = config.correction, config.loss_entry
    weights = chain.weights
    if len(weights) > 1:
        both = " and ".join(entry.name for entry in weights)
        yield (
            f"algorithm.correction={chain} has {len(weights)} weights, {both}: their product would "
            "correct the same step twice. Keep one; the others may be masks (mis_seq_geo, opsm, veto)."
        )
    # At proximal=behavior the ratio contains the whole correction, and w is 1.
    if config.proximal == "behavior" and not loss.has_ratio:
        yield (
            f"algorithm.proximal=behavior with algorithm.loss={config.loss.name}: it has no ρ that could carry the "
            "step from the behavior policy, so stale tokens would not be corrected at all. Use proximal=target with "
            "algorithm/correction=tis_token."
        )
    elif config.proximal == "behavior":
        for entry in weights:
            yield (
                f"algorithm.correction={entry.name} with algorithm.proximal=behavior counts the step from the behavior "
                "policy twice: ρ = exp(c − b) carries it already. Use algorithm/correction=none, or proximal=target."
            )
        for entry in chain.entries:
            if entry.compares_proximal:
                yield (
                    f"algorithm.correction={entry.name} with algorithm.proximal=behavior never acts: it compares p "
                    "with b, and they are the same. Use proximal=target, or opsm, which compares with the policy "
                    "itself."
                )
    # Losses that use b themselves, or compare whole sequences.
    if loss.level == "pair" and chain.chain:
        yield (
            f"algorithm.correction={chain} with algorithm.loss={loss.name}: a correction judges one token or sequence, "
            "and would weigh the two halves of a pair apart. Use algorithm/correction=none."
        )
    for entry in weights if loss.level != "pair" else ():
        if not loss.takes_weight:
            why = "it has no ratio to correct" if loss.name == "sft" else "it looks at the behavior policy itself"
            yield (
                f"algorithm.correction={entry.name} weighs algorithm.loss={loss.name}, but {why}: the step would be "
                "corrected twice or for nothing. Use algorithm/correction=none, or masks only."
            )
        elif loss.has_one_term and entry.level == "token":
            yield (
                f"algorithm.correction={entry.name} gives a weight per token, algorithm.loss={loss.name} has one term "
                "per sequence: it would get the mean weight, which corrects nothing. Use tis_seq or mis_seq_geo, or "
                "algorithm/loss=gspo_token."
            )
    for entry in chain.entries if loss.has_one_term else ():
        if entry.level == "batch":
            yield (
                f"algorithm.correction={entry.name} masks single tokens, algorithm.loss={loss.name} has one term per "
                "sequence: masked tokens would keep their gradient in it, and the term would shrink by their share. "
                "Use mis_seq_geo or veto, which mask sequences, or algorithm/loss=gspo_token."
            )
    # What compares all tokens of a batch needs the policy's logprobs of all of them before the first gradient.
    for entry in config.entries_of_batch:
        if config.proximal != "recompute":
            yield (
                f"algorithm.proximal={config.proximal} with algorithm.{entry.kind}={entry.name}: it compares all "
                "tokens of a batch by the policy's logprobs before the first gradient. Use proximal=recompute, one "
                "forward more per batch."
            )


def _of_terms(config: AlgorithmConfig) -> Iterator[str]:
    """Check that the terms of the loss match each other and the aggregation."""
    # A term of a sequence must count once per sequence.
    loss = config.loss_entry
    if loss.has_one_term and config.aggregation != "seq_mean_token_mean":
        yield (
            f"algorithm.aggregation={config.aggregation} with algorithm.loss={config.loss.name}: every token gets the "
            "one term of its sequence, so a sequence would count by its length. Use aggregation=seq_mean_token_mean."
        )
    for entry in (loss, *config.correction.weights):
        is_of_sequence = entry.level == "sequence" and not entry.has_one_term
        if is_of_sequence and config.aggregation not in SEQUENCE_MEANS:
            yield (
                f"algorithm.aggregation={config.aggregation} with algorithm.{entry.kind}={entry.name}: its ratio is "
                "that of a whole sequence, so the average must be over sequences. Use one of "
                f"{', '.join(SEQUENCE_MEANS)}."
            )
    # Factors per token need terms per token.
    factors = {"staleness_decay": config.staleness_decay, "entropy_top_share": config.entropy_top_share}
    for key, value in factors.items():
        if value < 1 and (loss.level == "pair" or loss.has_one_term):
            yield (
                f"algorithm.{key}={value:g} with algorithm.loss={config.loss.name}: it weights the tokens of a "
                f"sequence, but they all have the same term. Use {key}=1."
            )
    # The gradient of an estimator is that of a divergence only in one of the two places.
    if config.kl_in_loss and config.kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator=k1 with algorithm.kl.apply_to=loss: the gradient of c − r has zero mean, so it "
            "only adds noise. Use k2 (reverse KL) in the loss, or kl.apply_to=reward."
        )
    if config.kl_in_reward and config.kl.estimator != "k1":
        yield (
            f"algorithm.kl.estimator={config.kl.estimator} with algorithm.kl.apply_to=reward: as a reward only k1 "
            "gives the gradient of the divergence. Use kl.estimator=k1, or kl.apply_to=loss."
        )
    if config.kl_in_loss and config.correction.renormalize != "none":
        yield (
            f"algorithm.correction.renormalize={config.correction.renormalize} with algorithm.kl.apply_to=loss and "
            f"kl.coefficient={config.kl.coefficient:g}: masks leave the divergence alone, and the whole gradient is "
            "divided by the share that they kept, so the coefficient would grow as they reject more. Use "
            "correction.renormalize=none, or kl.apply_to=reward with kl.estimator=k1."
        )
    has_bonus = config.entropy.coefficient > 0 or config.entropy.target is not None
    if has_bonus and config.correction.renormalize != "none":
        yield (
            f"algorithm.correction.renormalize={config.correction.renormalize} with algorithm.entropy.coefficient="
            f"{config.entropy.coefficient:g} and target={config.entropy.target}: masks leave the entropy bonus alone, "
            "and the whole gradient is divided by the share that they kept, so the bonus would grow as they reject "
            "more. Use correction.renormalize=none, or entropy.coefficient=0 without a target."
        )
    if has_bonus and config.compares_pairs:
        yield (
            f"algorithm.entropy.coefficient={config.entropy.coefficient:g} and target={config.entropy.target} with "
            f"algorithm.loss={config.loss.name}: the bonus is a mean over tokens, and this loss a mean over pairs. Use "
            "entropy.coefficient=0 without a target; the pair's own β (algorithm.loss.beta) keeps the policy near the "
            "reference."
        )
    if config.entropy.target is not None and config.entropy.coefficient > config.entropy.max_coefficient:
        yield (
            f"algorithm.entropy.coefficient={config.entropy.coefficient:g} is above max_coefficient="
            f"{config.entropy.max_coefficient:g}, to which a target limits it. Use a larger max_coefficient."
        )
    if config.nll_coefficient and config.correction.renormalize != "none":
        yield (
            f"algorithm.correction.renormalize={config.correction.renormalize} with algorithm.nll_coefficient="
            f"{config.nll_coefficient:g}: no correction weighs the logprobs of answers that pass, and the whole "
            "gradient is divided by the share that is left, so the coefficient would grow as more is rejected. Use "
            "correction.renormalize=none."
        )
    if config.compares_pairs and config.kl.coefficient:
        yield (
            f"algorithm.kl.coefficient={config.kl.coefficient:g} with algorithm.loss={config.loss.name}: the pair's "
            "own β (algorithm.loss.beta) holds the policy to the reference. Use kl.coefficient=0."
        )
    # A trust region that moves with the policy does not limit it.
    if config.updates_per_batch > 1 and config.proximal == "target" and loss.is_plain_at_one:
        yield (
            f"algorithm.proximal=target with algorithm.mini_batches={config.mini_batches} x epochs={config.epochs} and "
            f"algorithm.loss={config.loss.name}: from the second update on the centre of its ratio would be the policy "
            "itself, so that ρ is 1 and clips do nothing. Use proximal=recompute (one forward more per batch), "
            "interpolate (none) or behavior."
        )


def _of_rewards(config: AlgorithmConfig) -> Iterator[str]:
    """Check that the rewards are what the advantage needs."""
    if isinstance(config.advantage, GaeConfig) and config.advantage.bootstrap and config.overlong.mode == "penalty":
        yield (
            "algorithm.advantage.bootstrap=true with algorithm.overlong.mode=penalty: the first treats the length "
            "limit as no end of the task, the second punishes answers that come near it. Use one of the two."
        )
    # MaxRL divides by the mean reward, which must be a success rate.
    negative = {"overlong.mode": config.overlong.mode == "penalty", "kl.apply_to": config.kl_in_reward > 0}
    for key, is_subtracted in negative.items():
        if config.advantage.type == "maxrl" and is_subtracted:
            yield (
                f"algorithm.{key}={attrgetter(key)(config)} with algorithm.advantage=maxrl: what it subtracts makes "
                "rewards negative, but maxrl divides by their mean. Use algorithm/advantage=grpo, or leave it out."
            )
    # Parts of the reward are normalised separately only by an estimator of groups, and only if nothing else is added.
    others = {
        "advantage": find("advantage", config.advantage.name).level != "group",
        "overlong.mode": config.overlong.mode == "penalty",
        "kl.apply_to": config.kl_in_reward > 0,
        "loss": config.compares_pairs,
    }
    for key, conflicts in others.items():
        if config.reward_weights and conflicts:
            section = attrgetter(key)(config)
            value = getattr(section, "name", section)
            yield (
                f"algorithm.reward_weights with algorithm.{key}={value}: each part is normalised in its group and then "
                "summed, but that needs the reward as a whole. Use one of the two."
            )


def _of_unused_settings(config: AlgorithmConfig) -> Iterator[str]:
    """Check settings that have no effect: losses of pairs and of a teacher use no advantage, and pairs have no ratio.

    The defaults are accepted there, because they cost nothing.
    """
    of_pair, of_teacher = "it compares the rewards of a pair", "the teacher's logprobs replace it"
    has_none = config.compares_pairs or config.loss.type == "distill"
    if has_none and config.advantage.type != _UNUSED_ADVANTAGE:
        yield (
            f"algorithm.advantage={config.advantage.name} with algorithm.loss={config.loss.name} has no effect: "
            f"{of_pair if config.compares_pairs else of_teacher}. "
            f"Use algorithm/advantage={_UNUSED_ADVANTAGE}, the default, which costs nothing."
        )
    if config.teacher_coefficient and (config.compares_pairs or not config.loss_entry.needs_advantages):
        yield (
            f"algorithm.teacher_coefficient={config.teacher_coefficient:g} with algorithm.loss={config.loss.name} has "
            "no effect: it is added to the advantage, and this loss uses none. Use 0, or a loss of advantages such as "
            "ppo_clip."
        )
    for entry in config.correction.entries if config.loss.type == "distill" else ():
        if entry.reads_advantages:
            yield (
                f"algorithm.correction={entry.name} with algorithm.loss={config.loss.name}: it masks answers of "
                "negative advantage, and this loss has none. Use mis_seq_geo, veto or a weight."
            )
    # A loss of pairs is a mean over pairs.
    if config.compares_pairs and config.aggregation != _UNUSED_AGGREGATION:
        yield (
            f"algorithm.aggregation={config.aggregation} with algorithm.loss={config.loss.name} has no effect: the "
            f"loss is the mean over the pairs of a batch. Use aggregation={_UNUSED_AGGREGATION}, the default."
        )
    if config.compares_pairs and config.proximal in ("recompute", "interpolate"):
        yield (
            f"algorithm.proximal={config.proximal} with algorithm.loss={config.loss.name} has no effect: a pair is "
            "compared with the reference, so there is no ratio. Use proximal=target."
        )
