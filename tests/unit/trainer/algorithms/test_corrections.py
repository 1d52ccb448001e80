"""Behavior corrections and their chain, against the oracle."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.catalog import find, names
from penstock.trainer.algorithms.objective import correct
from tests.algorithms import correction_config

from . import oracle
from .micro_batches import LENGTHS, data, far_apart, tokens_of

SETTINGS = {
    "correction_cap": 1.6, "tis_cap": 1.4, "mis_low": 0.7, "mis_high": 1.5, "geo_low": 0.85, "geo_high": 1.1,
    "opsm_delta": 0.05, "f_tis_max_kl": 0.1, "veto_min": 0.5, "tis_low": 0.8,
}  # fmt: skip
CONFIG = SimpleNamespace(**SETTINGS)
CASES = {
    **{f"{shape}-{seed}": data(lengths, seed) for shape, lengths in LENGTHS.items() for seed in range(4)},
    "sequence-advantages": data(LENGTHS["ragged"], 7, advantages="sequence"),
    "far-apart": far_apart(),
}
CHAINS = [
    *((name,) for name in names("correction")),
    ("tis_token", "mis_seq_geo"),
    ("opsm", "decoupled", "veto"),
    ("tis_token", "m2po"),
    ("tis_seq", "opsm", "mis_seq_geo", "veto"),
]


def chain_of(chain: tuple[str, ...], d: oracle.Data, dtype: torch.dtype = torch.float64):
    sections = correction_config(chain, **SETTINGS).chain
    functions = [partial(find("correction", name).load(), config=sections[name]) for name in chain]
    return correct(functions, tokens_of(d, dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
def test_a_chain_multiplies_weights_and_masks_what_any_masks(chain: tuple[str, ...], case: str) -> None:
    d = CASES[case]
    each = [oracle.corrected(name, d, CONFIG) for name in chain]
    weights = np.array([np.prod([one[t][0] for one in each]) for t in range(len(d.c))], dtype=np.float64)
    masked = np.array([any(one[t][1] for one in each) for t in range(len(d.c))], dtype=bool)
    found = chain_of(chain, d)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-9)
    np.testing.assert_array_equal(found.is_masked, masked)
    np.testing.assert_allclose(found.factors, np.where(masked, 0.0, weights), rtol=1e-9)
    assert not found.weights.requires_grad
    small = chain_of(chain, d, torch.float32)
    assert np.linalg.norm(small.weights.double() - weights) <= 1e-5 * np.linalg.norm(weights)


@pytest.mark.parametrize("name", [name for name in names("correction") if name not in ("tis_token", "tis_seq")])
def test_the_cases_reach_kept_and_masked_tokens(name: str) -> None:
    masked = np.concatenate([chain_of((name,), d).is_masked for d in CASES.values()])
    assert 0.05 < masked.mean() < 0.95


@pytest.mark.parametrize("name", names("correction"))
def test_on_policy_nothing_is_weighed_or_masked(name: str) -> None:
    d = CASES["ragged-0"]
    same = oracle.Data(d.c, d.c, d.c, d.r, d.advantage, d.segments, d.num_segments, extra=d.extra)
    found = chain_of((name,), same)
    assert found.weights.tolist() == [1.0] * len(d.c)
    assert not found.is_masked.any()


def test_no_gradient_flows_through_a_weight_of_the_policy_itself() -> None:
    """p = c with its graph: the worst a caller could do."""
    tokens = tokens_of(CASES["ragged-0"])
    tokens = type(tokens)(
        **{f: getattr(tokens, f) for f in tokens.__slots__ if f != "proximal"}, proximal=tokens.target
    )
    sections = correction_config(names("correction"), **SETTINGS).chain
    for name in names("correction"):
        assert not find("correction", name).load()(tokens, sections[name]).weights.requires_grad, name
