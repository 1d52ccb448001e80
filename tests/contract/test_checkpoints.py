"""Any backend continues from a checkpoint, with any ZeRO stage, number of ranks and tensor-parallel size."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from penstock.trainer.checkpoint import CheckpointReader
from penstock.trainer.spec import free_port
from tests.contract.checkpoint_cases import LONG_PAIRS, PAIRS, Pair, label, pairs_of, restore, save
from tests.contract.trainer_backend_cases import Case, create_policies
from tests.rank_processes import run_ranks
from tests.tiers import IS_FULL

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.integration,
]  # of the test that starts the processes for all others

PROGRAM = "tests.contract.checkpoint_cases"
LOSSES = ("loss/policy", "critic/loss", "mismatch/abs_logprob_mean")
_OF_ADAMW = dict.fromkeys(("value", "exp_avg", "exp_avg_sq"), 0.0)
UNCHANGED = {"adamw": _OF_ADAMW, "bfloat16 moments": _OF_ADAMW, "muon": _OF_ADAMW | {"momentum_buffer": 0.0}}
"""Differences of equal checkpoints, by optimizer."""


@pytest.fixture(scope="module")
def form() -> str:
    """`long` where all pairs are run."""
    return "long" if IS_FULL else "short"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    create_policies(folder)
    return folder


@pytest.fixture(scope="module")
def saved(form: str, folder: Path) -> dict[Case, list[dict[str, float]]]:
    """By saver: metrics of its steps after the checkpoint."""
    savers = [pair.saver for pair in pairs_of(form)]
    of_torch = {case: save(case, folder) for case in dict.fromkeys(savers) if case.backend == "torch"}
    return of_torch | run("save", form, folder, savers)


@pytest.fixture(scope="module")
def restored(form: str, folder: Path, saved: dict) -> dict[Pair, list[dict[str, float]]]:
    """By pair: metrics of the same steps of the trainer that continues."""
    pairs = pairs_of(form)
    of_torch = {pair: restore(pair, folder) for pair in pairs if pair.goes_on.backend == "torch"}
    return of_torch | run("restore", form, folder, [pair.goes_on for pair in pairs])


def run(phase: str, form: str, folder: Path, cases: list[Case]) -> dict:
    results: dict = {}
    for world in dict.fromkeys(case.ranks for case in cases if case.backend != "torch"):
        port = free_port()
        arguments = [(phase, form, rank, port, folder, *world) for rank in range(world[0])]
        run_ranks(PROGRAM, arguments, timeout_s=900, imports=["deepspeed"])
        results |= pickle.loads((folder / "-".join(map(str, [phase, *world]))).read_bytes())
    return results


def pairs(*, same: bool | None = None) -> list:
    return [
        pytest.param(
            pair, id=f"{label(pair.saver)}->{label(pair.goes_on)}", marks=[pytest.mark.full] * (pair in LONG_PAIRS)
        )
        for pair in PAIRS + LONG_PAIRS
        if same in (None, pair.is_same)
    ]


def differences(mine: Path, theirs: Path) -> dict[str, float]:
    """Largest absolute difference by kind, over all parameters of two checkpoints with equal counters, if any."""
    readers = CheckpointReader(mine), CheckpointReader(theirs)
    assert readers[0]._shapes == readers[1]._shapes
    assert readers[0]._num_updates == readers[1]._num_updates
    assert readers[0].counters._replace(num_ranks=0) == readers[1].counters._replace(num_ranks=0)
    found: dict[str, float] = {}
    for name in readers[0]._shapes:
        kinds = [reader.kinds(name) for reader in readers]
        assert kinds[0] == kinds[1]
        for kind in kinds[0]:
            difference = float((readers[0].full(name, kind) - readers[1].full(name, kind)).abs().max())
            found[kind] = max(found.get(kind, 0.0), difference)
    return found


@pytest.mark.parametrize("pair", pairs())
def test_what_is_restored_is_what_was_saved(pair: Pair, restored: dict, folder: Path) -> None:
    assert restored[pair]
    here = folder / label(pair.saver)
    assert differences(here / label(pair.goes_on) / "again", here / "saved") == UNCHANGED[pair.saver.optimizer]


@pytest.mark.parametrize("pair", pairs(same=True))
def test_the_same_trainer_goes_on_bit_for_bit(pair: Pair, saved: dict, restored: dict, folder: Path) -> None:
    assert restored[pair] == saved[pair.saver]
    here = folder / label(pair.saver)
    assert differences(here / label(pair.goes_on) / "later", here / "later") == UNCHANGED[pair.saver.optimizer]


@pytest.mark.parametrize("pair", pairs(same=False))
def test_another_trainer_computes_the_same_next_step(pair: Pair, saved: dict, restored: dict) -> None:
    mine, theirs = restored[pair][0], saved[pair.saver][0]
    # In bfloat16 the ranks pack sequences otherwise and so round otherwise.
    tolerance = 1e-6 if pair.saver.dtype == "float32" else 1e-3
    for name in (name for name in LOSSES if name in theirs):
        assert mine[name] == pytest.approx(theirs[name], rel=0, abs=tolerance), name
    assert mine["loss/grad_norm"] == pytest.approx(theirs["loss/grad_norm"], rel=1e-5 if tolerance == 1e-6 else 2e-2)
    assert mine["loss/lr"] == theirs["loss/lr"]
