"""A trainer rank as an actor, without Ray and without a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.actors.trainer import actor
from penstock.actors.trainer.actor import TrainerRank
from penstock.dataflow.ports import StepReport


class Trainer:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def step(self, _groups: object, _version: int) -> StepReport:
        self._calls.append("step")
        return StepReport(1, skipped=False, metrics={"loss/policy": 0.5}, busy_s=2.0)

    def token_logprobs(self, _examples: object) -> str:
        self._calls.append("logprobs")
        raise torch.OutOfMemoryError

    def export_weights(self) -> Any:
        self._calls.append("gather")
        yield from ()


CALLS: dict[str, Callable[[TrainerRank], object]] = {
    "step": lambda rank: rank.step([], 0),
    "logprobs": lambda rank: rank.learn("token_logprobs", []),
    "gather": lambda rank: rank.export(1),
}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("what", CALLS)
def test_what_torch_has_cached_goes_back_to_a_shared_device_after_each_call(
    what: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(actor, "payloads_of", lambda groups: groups)  # it asks Ray, which would start one
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    model, trainer = SimpleNamespace(dtype="float32"), SimpleNamespace(profile_steps=())
    spec = SimpleNamespace(shares_devices=shares, device="cpu", model=model, trainer=trainer, policy_id="policy")
    rank = TrainerRank(spec, 1)  # type: ignore[arg-type]
    rank._trainer = Trainer(calls)  # type: ignore[assignment]
    if what == "logprobs":  # also after a call that fails
        with pytest.raises(torch.OutOfMemoryError):
            CALLS[what](rank)
    else:
        answer = CALLS[what](rank)
        if isinstance(answer, StepReport):
            assert (answer.metrics["loss/policy"], answer.metrics["rank/busy_s/1"]) == (0.5, 2.0)
            assert answer.metrics["rank/product_tflops/1"] > 0
    assert calls == [what, "empty"] if shares else [what]
