"""The same training steps on every backend: plain torch is what DeepSpeed must equal, at any ZeRO stage and number of
ranks, and however tensor and sequence parallelism share the work out, and FSDP2, in any number of copies."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.platform.cluster.memory import keeps_gradients
from penstock.trainer.spec import free_port
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.checkpoint_names import checkpoint_tensors
from tests.contract.trainer_backend_cases import (
    CASES,
    LONG_CASES,
    REFERENCE,
    TIED,
    Case,
    build,
    cases_of,
    create_policies,
    run_case,
    weights_of,
)
from tests.rank_processes import run_ranks
from tests.tiers import IS_FULL
from tests.unit.weights.models import PADDING, vllm_rank

pytestmark = pytest.mark.timeout(3600)  # of a test that starts the worlds, each with four processes, for all others

PROGRAM = "tests.contract.trainer_backend_cases"


def is_float32(case: Case) -> bool:
    return case.dtype == "float32"


def is_exact(case: Case) -> bool:
    """Whether nothing is rounded otherwise than on one process: the bits that round moments go by place in a tensor."""
    is_split = case.zero_stage > 0 or (case.backend == "fsdp2" and case.world_size > 1)
    return is_float32(case) and not (case.optimizer == "bfloat16 moments" and is_split)


def those(is_one: Callable[[Case], bool]) -> list[Any]:
    """Cases as parameters; the long ones are marked so."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.full] if case in LONG_CASES else [])
        for case in CASES + LONG_CASES
        if is_one(case)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    create_policies(folder)
    return folder


@pytest.fixture(scope="module")
def form() -> str:
    """`long` where all cases are run."""
    return "long" if IS_FULL else "short"


@pytest.fixture(scope="module")
def references(form: str, folder: Path) -> dict[Case, dict]:
    """Plain torch, of every kind that the cases are of."""
    return {one: run_case(one, folder) for one in dict.fromkeys(map(plain, cases_of(form)))}


def plain(case: Case) -> Case:
    """Plain torch that trains the same."""
    names = ("adam_epsilon", "is_tied", "updates", "has_adapters", "optimizer", "has_experts")
    return dataclasses.replace(REFERENCE, **{name: getattr(case, name) for name in names})


def start_of(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Weights before the first step."""
    kind = dataclasses.replace(REFERENCE, is_tied=case.is_tied, has_experts=case.has_experts)
    return weights_of(build(kind, str(folder / case.policy)))


@pytest.fixture(scope="module")
def results_of_ranks(form: str, folder: Path) -> dict[tuple, dict]:
    results: dict[tuple, dict] = {}
    for world in dict.fromkeys(case.ranks for case in cases_of(form)):
        port = free_port()
        arguments = [(form, rank, port, folder, *world) for rank in range(world[0])]
        run_ranks(PROGRAM, arguments, timeout_s=1800, imports=["deepspeed"])
        results |= pickle.loads((folder / "-".join(map(str, ["ranks", *world]))).read_bytes())
    return results


def relative_error(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert actual.keys() == expected.keys()
    difference = sum(float(((actual[name] - expected[name]).astype(np.float64) ** 2).sum()) for name in expected)
    return (difference / sum(float((value.astype(np.float64) ** 2).sum()) for value in expected.values())) ** 0.5


def change(result: dict, start: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value - start[name] for name, value in result["weights"].items()}


class TrainerContract:
    """What holds for any backend; `result` and `reference` are given by the subclass."""

    def test_a_non_finite_batch_is_skipped_and_changes_nothing(self, result: dict) -> None:
        assert [report.skipped for report in result["reports"]] == [False, True, False]
        assert [report.version for report in result["reports"]] == [1, 1, 2]
        assert result["unchanged_by_skip"]
        assert result["reports"][1].metrics["loss/grad_norm"] == np.inf

    def test_metrics_equal_plain_torch(self, result: dict, reference: dict) -> None:
        for mine, theirs in zip(result["reports"], reference["reports"], strict=True):
            if mine.skipped:
                continue
            for name, value in theirs.metrics.items():
                if not name.startswith("trainer/"):
                    assert mine.metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
        assert result["sft_loss"] == pytest.approx(reference["sft_loss"], rel=2e-5)
        assert result["accuracy"] == pytest.approx(reference["accuracy"], rel=1e-5)
        np.testing.assert_allclose(result["logprobs"], reference["logprobs"], atol=1e-5)

    def test_weights_equal_plain_torch(self, result: dict, reference: dict) -> None:
        assert relative_error(result["weights"], reference["weights"]) < 1e-5

    def test_adapters_equal_plain_torch(self, result: dict, reference: dict) -> None:
        assert result["adapters"].keys() == reference["adapters"].keys()
        if reference["adapters"]:
            assert relative_error(result["adapters"], reference["adapters"]) < 1e-5

    def test_a_critic_next_to_the_policy_equals_plain_torch(self, result: dict, reference: dict) -> None:
        assert result["critic"].keys() == reference["critic"].keys()
        if reference["critic"]:
            assert relative_error(result["critic"], reference["critic"]) < 1e-5

    def test_what_is_written_for_engines_is_what_is_exported(self, result: dict) -> None:
        # ZeRO-3 multiplies up and down adapter for its stretch only: the sums may be rounded otherwise.
        tolerance = 1e-7 if result["adapters"] else 0.0
        (whole,) = result["shards"]["torch", 1]
        assert whole.keys() == result["weights"].keys()
        for name, weights in result["weights"].items():
            np.testing.assert_allclose(whole[name], weights.ravel(), rtol=0, atol=tolerance, err_msg=name)
        for size in (1, 2):
            for rank, shard in enumerate(result["shards"].get(("vllm", size), [])):
                reference = vllm_rank(result["weights"], TIED, size, rank)
                assert shard.keys() == reference.keys()
                for name, weights in reference.items():
                    expected = np.where(weights == PADDING, 0, weights).ravel()
                    np.testing.assert_allclose(shard[name], expected, rtol=0, atol=tolerance, err_msg=name)

    def test_what_is_saved_is_what_is_exported(self, result: dict, folder: Path) -> None:
        from safetensors.numpy import load_file

        saved = load_file(Path(result["saved"]) / "model.safetensors")
        config = transformers_config(Path(result["saved"]) / "config.json")
        exported = {name: torch.from_numpy(weights) for name, weights in result["weights"].items()}
        expected = {name: one.numpy() for name, one in checkpoint_tensors(config, exported).items()}
        assert relative_error(saved, expected) == 0.0
        assert (Path(result["saved"]) / "tokenizer.json").is_file()


class TestTorchBackend(TrainerContract):
    @pytest.fixture(params=[False, True], ids=["whole", "streamed"])
    def result(self, request: pytest.FixtureRequest, folder: Path) -> dict:
        return run_case(dataclasses.replace(REFERENCE, max_tokens=200, streamed=request.param), folder)

    @pytest.fixture
    def reference(self, references: dict) -> dict:
        return references[REFERENCE]


@pytest.mark.integration
class TestBackendsOfRanks(TrainerContract):
    @pytest.fixture(params=those(is_exact))
    def case(self, request: pytest.FixtureRequest) -> Case:
        return request.param

    @pytest.fixture
    def result(self, case: Case, results_of_ranks: dict) -> dict:
        return results_of_ranks[dataclasses.astuple(case)]

    @pytest.fixture
    def reference(self, case: Case, references: dict) -> dict:
        return references[plain(case)]


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda _: True))
def test_a_replica_that_has_left_the_others_is_seen_at_the_next_step(case: Case, results_of_ranks: dict) -> None:
    result = results_of_ranks[dataclasses.astuple(case)]
    has_replicas = case.world_size > case.tensor_parallel and not is_partitioned(case)
    before = [report.metrics.get("rank/desynchronised") for report in result["reports"]]
    assert (before, result["desynchronised"]) == (([0.0] * 3, 1.0) if has_replicas else ([None] * 3, None))
    spreads = [report.metrics.get("rank/loss_spread", 0.0) for report in result["reports"] if not report.skipped]
    assert (min(spreads) > 0) == (case.world_size > case.tensor_parallel)


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: is_float32(case) and case.adam_epsilon == 1.0))
def test_gradients_are_those_of_plain_torch(case: Case, results_of_ranks: dict, references: dict, folder: Path) -> None:
    start = start_of(case, folder)
    actual = change(results_of_ranks[dataclasses.astuple(case)], start)
    assert relative_error(actual, change(references[plain(case)], start)) < 1e-5


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: case.optimizer == "muon" and is_exact(case)))
def test_steps_of_muon_are_those_of_one_process(
    case: Case, results_of_ranks: dict, references: dict, folder: Path
) -> None:
    """On which it is torch's, bit for bit (tests/unit/trainer/test_optimizers.py)."""
    mine, theirs = results_of_ranks[dataclasses.astuple(case)], references[plain(case)]
    start = start_of(case, folder)
    changes = change(mine, start), change(theirs, start)
    assert relative_error(*changes) < 1e-2
    assert max(float(np.abs(changes[0][name] - changes[1][name]).max()) for name in start) < 1e-6


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: case.has_early_logprobs))
def test_groups_that_were_forwarded_before_their_batch_change_nothing(case: Case, results_of_ranks: dict) -> None:
    result = results_of_ranks[dataclasses.astuple(case)]
    without = results_of_ranks[dataclasses.astuple(dataclasses.replace(case, has_early_logprobs=False))]
    for mine, theirs in zip(result["reports"], without["reports"], strict=True):
        assert (mine.version, mine.skipped) == (theirs.version, theirs.skipped)
        shares = [report.metrics["trainer/early_logprobs_token_share"] for report in (mine, theirs)]
        assert 0.5 < shares[0] < 1
        assert shares[1] == 0.0
        for name, value in theirs.metrics.items():
            if not (name.startswith("trainer/") or mine.skipped):
                assert mine.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    for what in ("weights", "adapters", "critic"):
        assert result[what].keys() == without[what].keys()
        if without[what]:
            assert relative_error(result[what], without[what]) < 1e-6, what


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: not is_exact(case)))
def test_what_is_rounded_to_bfloat16_trains_float32_masters_close_to_those_of_plain_torch(
    case: Case, results_of_ranks: dict, references: dict
) -> None:
    result = results_of_ranks[dataclasses.astuple(case)]
    expected = references[plain(case)]
    assert result["sft_loss"] == pytest.approx(expected["sft_loss"], rel=1e-2)
    assert relative_error(result["weights"], expected["weights"]) < 1e-2
    norms = [[report.metrics["loss/grad_norm"] for report in one["reports"]] for one in (result, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert result["buffers"] == {"torch.float32"}, "rotary frequencies lost precision"


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda _: True))
def test_layers_are_compiled_only_where_configured(case: Case, results_of_ranks: dict) -> None:
    assert results_of_ranks[dataclasses.astuple(case)]["has_compiled_layers"] == case.is_compiled


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: case.zero_stage == 3))
def test_deepspeed_offloads_weights_only_where_configured(case: Case, results_of_ranks: dict) -> None:
    told = results_of_ranks[dataclasses.astuple(case)]["offloads_parameters"]
    assert (told is not None and told.device == "cpu") == case.offload_parameters


def is_partitioned(case: Case) -> bool:
    """Whether ranks have different parts of the policy, tensor parallelism aside."""
    return case.zero_stage == 3 or case.backend == "fsdp2"


@pytest.mark.integration
@pytest.mark.parametrize(
    "case",
    those(lambda case: case.world_size == 2 and (is_partitioned(case) or case.zero_stage) and not case.has_adapters),
)
def test_a_rank_of_two_has_half_of_the_moments(case: Case, results_of_ranks: dict, references: dict) -> None:
    mine, whole = results_of_ranks[dataclasses.astuple(case)], references[plain(case)]
    assert 0 < mine["moment_bytes"] <= 0.55 * whole["moment_bytes"]


def is_replicated(case: Case) -> bool:
    """Whether every rank has the whole policy, whose weights are trained."""
    return not is_partitioned(case) and not case.has_adapters and case.tensor_parallel * case.sequence_parallel == 1


@pytest.mark.integration
@pytest.mark.parametrize("case", those(lambda case: not is_float32(case) and is_replicated(case)))
def test_between_steps_a_rank_holds_weights_optimizer_state_and_the_gradient_buffers_that_deepspeed_never_frees(
    case: Case, results_of_ranks: dict
) -> None:
    """Bytes per parameter: 2 of weights, 4 of float32 copies, 4 of each state, and 4 of gradients where they stay."""
    share_of_embedding = case.shape.vocab_size * case.shape.hidden_size / case.shape.num_parameters
    states = {"adamw": 8.0, "bfloat16 moments": 4.0, "muon": 4.0 + 4.0 * share_of_embedding}[case.optimizer]
    config: Any = SimpleNamespace(
        trainer=SimpleNamespace(zero_stage=case.zero_stage, offload_optimizer=case.offload_optimizer),
        model=SimpleNamespace(dtype=case.dtype),
    )
    expected = 2 + (4 + states) / (case.world_size if case.zero_stage > 0 else 1) + 4 * keeps_gradients(config)
    held = results_of_ranks[dataclasses.astuple(case)]["held_bytes"] / case.shape.num_parameters
    assert held == pytest.approx(expected, rel=0.05)
