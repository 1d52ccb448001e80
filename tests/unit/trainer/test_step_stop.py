"""A step ends before it changes the weights, on all ranks or on none; meanwhile the weights can be saved."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from penstock.dataflow.errors import CheckpointError, TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.backends.base import OptimizerResult
from penstock.trainer.build import save_policy
from penstock.trainer.policy_trainer import PolicyTrainer, on_cpu
from penstock.trainer.step_stop import StepStop
from tests.unit.trainer.torch_trainer import trainer_of

LIMIT_S = 10.0


class TwoRanks:
    """Two threads with a collective between them.

    Attributes:
        stops: Of the ranks.
        decides: Set when a rank has told the other one what it wants.
        updated: The ranks that made their update.
    """

    def __init__(self) -> None:
        self.stops = [StepStop(), StepStop()]
        self.decides = [threading.Event(), threading.Event()]
        self.updated: list[int] = []
        self._barrier = threading.Barrier(2, timeout=LIMIT_S)
        self._values = [0.0, 0.0]

    def start(self, computes: dict[int, threading.Event]) -> list[threading.Thread]:
        """Start a step on both; a rank computes until its event is set."""
        threads = [threading.Thread(target=self._step, args=(rank, computes.get(rank))) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        return threads

    def _step(self, rank: int, computed: threading.Event | None) -> None:
        def all_reduce(values: NDArray[np.float64], operation: str) -> NDArray[np.float64]:
            assert operation == "max"
            self._values[rank] = float(values[0])
            self.decides[rank].set()
            self._barrier.wait()
            return np.array([max(self._values)])

        try:
            self.stops[rank].begin()
            if computed is not None:
                computed.wait(LIMIT_S)
            self.stops[rank].decide(all_reduce, is_last=True)
            self.updated.append(rank)
        except TrainingError:
            pass


def test_no_rank_updates_if_one_is_asked_before_it_decides() -> None:
    ranks, computed = TwoRanks(), threading.Event()
    threads = ranks.start({1: computed})
    assert ranks.decides[0].wait(LIMIT_S)
    answers = [stop.request() for stop in ranks.stops]
    computed.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == [False, True], "rank 0 has told the other one that it goes on; rank 1 has not"
    assert ranks.updated == []


def test_all_ranks_update_if_they_are_asked_after_they_have_decided() -> None:
    ranks = TwoRanks()
    for thread in ranks.start({}):
        thread.join(LIMIT_S)
    assert sorted(ranks.updated) == [0, 1]
    assert [stop.request() for stop in ranks.stops] == [False, False]
    with pytest.raises(TrainingError, match="the run ends"):
        ranks.stops[0].begin()


def test_a_step_that_is_asked_to_end_makes_no_further_micro_batch(policy: str, batch: list[GroupPayload]) -> None:
    trainer, num_forwards = trainer_of(policy, 40), 0
    forward = trainer.backend.forward

    def ends_in_the_first(*arguments: object) -> object:
        nonlocal num_forwards
        num_forwards += 1
        assert trainer.stop.request(), "nothing was decided"
        return forward(*arguments)  # type: ignore[arg-type]

    trainer.backend.forward = ends_in_the_first  # type: ignore[method-assign,assignment]
    before = [tensor.clone() for _, tensor in trainer.export_weights()]
    with pytest.raises(TrainingError, match="the run ends"):
        trainer.step(batch, 0)
    assert num_forwards == 1
    assert all(torch.equal(now, old) for old, (_, now) in zip(before, trainer.export_weights(), strict=True))


def test_a_step_that_is_ended_between_two_updates_saves_the_version_before_it(
    policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    trainer = trainer_of(policy, 1000, lr=1.0, adam_epsilon=1.0, mini_batches=2, proximal="recompute")
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    end_after_one_update(trainer)
    with pytest.raises(TrainingError, match="the run ends"):
        trainer.step(batch, 0)
    assert any(not torch.equal(before[name], now) for name, now in trainer.export_weights()), "one update was made"
    save_policy(trainer, str(tmp_path / "saved"), policy, [trainer.held_weights(0)])
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    with pytest.raises(CheckpointError, match="between two of its updates"):
        trainer.snapshot(0)


def test_a_rank_on_cpu_cores_saves_without_the_gpus_that_it_sees(
    policy: str, batch: list[GroupPayload], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(policy, 1000)

    def no_context(*args: object) -> None:
        raise AssertionError("a CUDA context was made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", no_context)
    monkeypatch.setattr(torch.cuda, "synchronize", no_context)
    held = on_cpu(trainer.held_weights(), trainer.backend.device)
    assert all(torch.equal(held["model"][name], tensor.view(-1)) for name, tensor in trainer.export_weights())


@pytest.mark.parametrize("max_tokens", [40, 1000], ids=["before a micro-batch", "in the last micro-batch"])
def test_a_step_that_is_ended_before_its_first_update_may_be_kept_as_a_checkpoint(
    policy: str, batch: list[GroupPayload], max_tokens: int
) -> None:
    trainer = trainer_of(policy, max_tokens, mini_batches=2, proximal="recompute")
    backward = trainer.backend.backward

    def ends_in_the_first(*arguments: object, **named: object) -> None:
        trainer.stop.request()
        backward(*arguments, **named)  # type: ignore[arg-type]

    trainer.backend.backward = ends_in_the_first  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingError, match="the run ends"):
        trainer.step(batch, 0)
    trainer.snapshot(0).wait()


def test_what_both_of_two_policies_skip_may_be_kept_as_a_checkpoint(policy: str, batch: list[GroupPayload]) -> None:
    trainer = trainer_of(policy, 1000)
    trainer._spec = replace(trainer._spec, has_partner=True)
    trainer.backend.optimizer_step = lambda *_: OptimizerResult(math.nan, is_skipped=True)  # type: ignore[method-assign]
    assert trainer.step(batch, 0).skipped
    trainer.snapshot(0).wait()


def test_a_policy_is_saved_over_what_a_killed_process_left(policy: str, tmp_path: Path) -> None:
    trainer, target = trainer_of(policy, 40), tmp_path / "policy"
    for left in (target, tmp_path / "policy.previous", tmp_path / "policy.unfinished"):
        left.mkdir()
        (left / "stale").touch()
    save_policy(trainer, str(target), policy)
    assert (target / "model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (target / "stale").exists()


def test_a_trainer_with_a_partner_keeps_the_version_before_its_step(policy: str, batch: list[GroupPayload]) -> None:
    trainer = trainer_of(policy, 1000, lr=1.0, adam_epsilon=1.0)
    trainer._spec = replace(trainer._spec, has_partner=True)
    before = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    assert trainer.step(batch, 0).version == 1
    held = trainer.held_weights(0)["model"]
    now = trainer.held_weights(1)["model"]
    with pytest.raises(CheckpointError, match="v0 cannot be kept"):
        trainer.snapshot(0)
    trainer.snapshot(1).wait()
    assert all(torch.equal(held[name].flatten(), tensor.flatten()) for name, tensor in before.items())
    assert any(not torch.equal(held[name].flatten(), now[name].flatten()) for name in before)


def test_a_step_of_several_updates_that_is_completed_saves_its_own_result(
    policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    trainer = trainer_of(policy, 1000, lr=1.0, adam_epsilon=1.0, mini_batches=2, proximal="recompute")
    trainer.step(batch, 0)
    save_policy(trainer, str(tmp_path / "saved"), policy)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.export_weights())


def end_after_one_update(trainer: PolicyTrainer) -> None:
    """Ask the step to end as soon as it has made its first update."""
    update = trainer.backend.optimizer_step

    def optimizer_step(normaliser: float = 1.0) -> object:
        result = update(normaliser)
        assert trainer.stop.request(), "the last update is not decided"
        return result

    trainer.backend.optimizer_step = optimizer_step  # type: ignore[method-assign,assignment]
