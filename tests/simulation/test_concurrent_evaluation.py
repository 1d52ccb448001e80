"""Evaluations share the engines and are not in the ledger; one version answers the first and the last one."""

from __future__ import annotations

import asyncio

import pytest

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ports import GenerateRequest
from penstock.platform.run.evaluation import Evaluation
from penstock.platform.simulator.config import parse_simulation
from penstock.platform.simulator.engine import SimulatedEngine, TokenStream
from penstock.platform.simulator.engine_processes import EngineClasses
from penstock.platform.simulator.simulation import Parts, Simulation, simulate
from penstock.platform.simulator.virtual_loop import VirtualTimeLoop

STEPS, BATCH = 8, 2
LONG_ANSWERS = ["profile=longtail", "engines=2", "slots=8", "group_size=2", f"batch={BATCH}", f"steps={STEPS}"]


def simulated(overrides: list[str]) -> Simulation:
    simulation = Simulation(parse_simulation([*LONG_ANSWERS, "eval_every=1", *overrides]), 0, Parts())
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(simulation.main())
    return simulation


def evaluations(simulation: Simulation) -> list[Evaluation]:
    return simulation.run.evaluations.done


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("mode", ["keep_kv", "multi_version"])
def test_one_version_answers_the_first_and_the_last_evaluation(mode: str, overlap: str) -> None:
    first, *during, last = evaluations(simulated([f"update_mode={mode}", f"overlap={overlap}"]))
    assert (first.version_min, first.version_max) == (0, 0)
    assert (last.version_min, last.version_max) == (STEPS, STEPS)
    if mode == "keep_kv":
        assert any(one.version_min < one.version_max for one in during), "the others span several versions"


def test_evaluations_never_enter_the_ledger_and_train_nothing() -> None:
    simulation = simulated([])
    assert len(evaluations(simulation)) > 2
    counts = simulation.core.ledger.counts()
    assert counts.admitted == counts.trained == STEPS * BATCH
    assert simulation.trainer.trained.tasks == set(range(STEPS * BATCH))


class RefusesInItsSleep(SimulatedEngine):
    """Refuses requests while asleep, as real engines do."""

    is_asleep = False
    num_refused = 0

    async def sleep(self) -> None:
        self.is_asleep = True
        await super().sleep()

    async def wake(self) -> None:
        self.is_asleep = False
        await super().wake()

    def generate(self, request: GenerateRequest) -> TokenStream:
        if not self.is_asleep:
            return super().generate(request)
        type(self).num_refused += 1
        stream = TokenStream()
        stream.put(EngineLostError(f"{self.engine_id}: asked to generate while asleep"))
        return stream


@pytest.mark.parametrize("seed", range(4))
def test_colocated_engines_are_awake_until_the_last_turn_of_an_evaluation(seed: int) -> None:
    settings = ["colocated=true", "eta=0", "turns=3", "eval_every=1", "steps=8", "profile=short", "engines=2"]
    RefusesInItsSleep.num_refused = 0
    outcome = simulate(
        parse_simulation([*settings, "tool_mean_s=5", "update_mode=keep_kv"]),
        seed,
        Parts(engines=EngineClasses(engine=RefusesInItsSleep)),
    )
    assert outcome.violation is None
    assert RefusesInItsSleep.num_refused == 0
