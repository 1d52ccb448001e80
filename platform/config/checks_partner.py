"""Cross-field checks of a run of two policies."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.rules import weights_in

_LOOK_AT_BEHAVIOR = ("dppo", "topr")
"""Losses that take the sampling policy into account by themselves."""


def check_partner(config: RunConfig) -> Iterator[Finding]:
    """What two policies share must mean the same to both, and what the other has sampled must not count as own."""
    partner, flow, algorithm = config.partner, config.dataflow, config.algorithm
    if partner is None:
        return
    if partner.model.path is None or partner.model.from_scratch:
        yield error("partner.model.path is not set: the partner starts from a policy on disk.", "partner.model.path")
    ours, theirs = config.model.shape.vocab_size, partner.model.shape.vocab_size
    if ours != theirs:
        yield error(
            f"partner.model.shape.vocab_size={theirs} differs from model.shape.vocab_size={ours}: each trains on "
            "tokens that the other has sampled. Use two policies of one tokenizer.",
            "partner.model.shape.vocab_size",
            "model.shape.vocab_size",
        )
    if flow.group_size % 2:
        yield error(
            f"dataflow.group_size={flow.group_size} is odd: half of each group is sampled by the partner. Use "
            f"{flow.group_size + 1}.",
            "dataflow.group_size",
            "partner",
        )
    loss = find("loss", algorithm.loss)
    has_own_ratio = loss.has_ratio and algorithm.proximal == "behavior"
    carries = loss.name in _LOOK_AT_BEHAVIOR or loss.level == "pair" or has_own_ratio
    if not weights_in(algorithm) and not carries and not loss.is_own:
        yield error(
            f"partner with algorithm.correction={list(algorithm.correction)}: what the partner has sampled would count "
            "as if the policy had. Use algorithm.correction=[f_tis].",
            "partner",
            "algorithm.correction",
        )
    for key, is_set, why in (
        ("algorithm.kl_coefficient", algorithm.needs_reference, "the reference scores groups for one policy"),
        ("dataflow.gang", flow.gang, "a gang is on one engine, and the members of a group are on two"),
        ("dataflow.stream_micro_batches", flow.stream_micro_batches, "both train a batch that is complete"),
        ("cluster.colocated", config.cluster.colocated, "turns are of one trainer and its engines"),
        ("algorithm.proximal", algorithm.proximal == "interpolate", "what the partner has sampled has no staleness"),
    ):
        if is_set:
            yield error(f"partner with {key}={_value(config, key)}: {why}. Leave it at its default.", "partner", key)


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
