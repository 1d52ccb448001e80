"""Checkpoints of a trainer on plain torch: it continues as if it had not stopped, and damaged files are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from penstock.dataflow.errors import CheckpointError
from penstock.dataflow.ports import WrittenFile
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer import checkpoint, policy_trainer
from penstock.trainer.backends.base import OptimizerResult
from penstock.trainer.checkpoint import (
    CheckpointReader,
    Counters,
    Fragment,
    TrainerSnapshot,
    deal,
    verify,
    write_snapshot,
)
from penstock.trainer.config import LoraConfig, MuonConfig, OptimizerConfig
from penstock.trainer.policy_trainer import PolicyTrainer

from .torch_trainer import trainer_of

KINDS = {
    "policy": {"warmup_steps": 5},
    "critic": {"advantage": "gae", "mini_batches": 2, "proximal": "recompute"},
    "critic at a ratio": {"advantage": "gae", "mini_batches": 2, "proximal": "recompute", "critic_ratio": 1.7},
    "controllers": {
        "entropy_coefficient": 1e-3,
        "entropy_target": 9.0,
        "kl_coefficient": 0.1,
        "kl_target": 0.01,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "lora": LoraConfig(rank=4, alpha=12),
    },
    "adapters": {"lora": LoraConfig(rank=4, alpha=12)},
    "muon": {"optimizer": OptimizerConfig(lr=1e-3, muon=MuonConfig())},
    "bfloat16 moments": {"optimizer": OptimizerConfig(lr=1e-3, moments_dtype="bfloat16")},
}


def trained(trainer: PolicyTrainer, batch: list[GroupPayload], versions: range) -> list[dict[str, float]]:
    """Metrics of the steps from these versions, without those of time."""
    reports = [trainer.step(batch, version) for version in versions]
    return [{k: v for k, v in one.metrics.items() if k.startswith(("loss/", "ratio/", "critic/"))} for one in reports]


def state_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    taken = trainer.snapshot(0)
    return {
        f"{prefix}/{one.name}/{kind}": tensor
        for prefix, fragments in taken.fragments.items()
        for one in fragments
        for kind, tensor in (*one.values.items(), ("num_updates", torch.tensor(one.num_updates)))
    }


def saved(trainer: PolicyTrainer, folder: Path, version: int = 3) -> WrittenFile:
    return write_snapshot(trainer.snapshot(version), folder, 0)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_trainer_goes_on_bit_for_bit(
    kind: str, policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    trainer = trainer_of(policy, **KINDS[kind])
    trained(trainer, batch, range(3))
    verify(tmp_path, [saved(trainer, tmp_path)])
    expected_draw = torch.rand(3)
    expected = trained(trainer, batch, range(3, 6))
    restored = trainer_of(policy, **KINDS[kind])
    assert restored.restore(str(tmp_path)) == 3
    assert torch.equal(torch.rand(3), expected_draw), "the random generator goes on too"
    assert trained(restored, batch, range(3, 6)) == expected
    mine, theirs = state_of(restored), state_of(trainer)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    states = [kept for backend in trainer.backends().values() for kept in backend._optimizer.states.values()]
    assert len(mine) == sum(2 + len(kept) for kept in states), "a value and a counter beside them"
    with_adapters = [name for name in mine if "lora_" in name]
    assert len(with_adapters) == (len(mine) if "lora" in KINDS[kind] else 0), "the weights under adapters are not saved"
    assert kind.startswith("critic") == any(name.startswith("critic/") for name in mine)


def test_a_trainer_that_made_no_step_is_restored_as_it_began(
    policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    trainer = trainer_of(policy)
    saved(trainer, tmp_path, version=0)
    expected = trained(trainer, batch, range(2))
    restored = trainer_of(policy)
    trained(restored, batch, range(1))
    assert restored.restore(str(tmp_path)) == 0
    assert trained(restored, batch, range(2)) == expected


def test_training_meanwhile_does_not_change_what_is_written(
    policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    trainer = trainer_of(policy)
    trained(trainer, batch, range(2))
    before = state_of(trainer)
    taken = trainer.snapshot(2)
    trained(trainer, batch, range(2, 3))
    write_snapshot(taken, tmp_path, 0)
    reader = CheckpointReader(tmp_path)
    for name, tensor in before.items():
        parameter, _, kind = name.rpartition("/")
        if kind != "num_updates":
            assert torch.equal(reader.full(parameter, kind).view(-1), tensor), name
    assert not all(torch.equal(tensor, before[name]) for name, tensor in state_of(trainer).items())


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", [*KINDS, "critic alone"])
def test_an_optimizer_step_waits_for_the_copy(
    kind: str, policy: str, batch: list[GroupPayload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(policy, **KINDS[kind.removesuffix(" alone")])
    trained(trainer, batch, range(2))
    before = state_of(trainer)
    if kind == "critic alone":  # whose policy has no gradient, and makes no step
        monkeypatch.setattr(policy_trainer, "split_by_signal", lambda sequences, _algorithm: ([], list(sequences)))
    has_stepped, copy = threading.Event(), checkpoint._host_copies

    def copies_after_a_step(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        has_stepped.wait(0.5)  # in vain, if the step waits for the copy
        return copy(tensors)

    monkeypatch.setattr(checkpoint, "_host_copies", copies_after_a_step)
    for backend in trainer.backends().values():
        monkeypatch.setattr(backend, "optimizer_step", then_set(has_stepped, backend.optimizer_step))
    taken = trainer.snapshot(2)
    first, second = (trainer.step(batch, version).metrics for version in (2, 3))
    assert has_stepped.is_set()
    assert first["checkpoint/copy_wait_s"] > 0
    assert "checkpoint/copy_wait_s" not in second
    written = {f"{prefix}/{one.name}/{of}": tensor for prefix, fragments in taken.fragments.items()
               for one in fragments for of, tensor in one.values.items()}  # fmt: skip
    assert written.keys() == {name for name in before if not name.endswith("num_updates")}
    for name, tensor in written.items():
        assert torch.equal(tensor, before[name]), name


def then_set(event: threading.Event, call: Callable[[float], OptimizerResult]) -> Callable[..., OptimizerResult]:
    def called(normaliser: float = 1.0) -> OptimizerResult:
        result = call(normaliser)
        event.set()
        return result

    return called


def test_a_copy_that_fails_costs_the_checkpoint_and_not_the_step(
    policy: str, batch: list[GroupPayload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(_tensors: object) -> list[torch.Tensor]:
        raise MemoryError("4 GiB could not be allocated")

    trainer = trainer_of(policy)
    monkeypatch.setattr(checkpoint, "_host_copies", no_memory)
    taken = trainer.snapshot(0)
    trained(trainer, batch, range(1))
    with pytest.raises(CheckpointError, match=r"copying the state to host memory: MemoryError: 4 GiB"):
        write_snapshot(taken, tmp_path, 0)


def test_the_file_is_one_that_safetensors_reads(policy: str, batch: list[GroupPayload], tmp_path: Path) -> None:
    trainer = trainer_of(policy)
    trained(trainer, batch, range(1))
    written = saved(trainer, tmp_path)
    assert written.name == "trainer_00000.safetensors"
    assert written.num_bytes == (tmp_path / written.name).stat().st_size
    with safe_open(tmp_path / written.name, "np") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118
        assert len(names) == 3 * len(dict(trainer.export_weights()))
        for name, tensor in trainer.export_weights():
            assert np.array_equal(file.get_tensor(f"model/causal_lm.{name}/0/value"), tensor.numpy().ravel())


def fragment(name: str = "w", box=((0, 4), (0, 3)), start: int = 0, length: int = 12) -> Fragment:
    """Of a [4, 3] matrix whose elements are their row-major index."""
    matrix = torch.arange(12.0).view(4, 3)[tuple(slice(*one) for one in box)].reshape(-1)
    values = {
        kind: matrix[start : start + length] + shift
        for kind, shift in zip(("value", "exp_avg", "exp_avg_sq"), (0, 100, 200), strict=True)
    }
    return Fragment(name, (4, 3), box, start, values, 7)


def write(folder: Path, *of_ranks: list[Fragment], version: int = 1) -> list[WrittenFile]:
    counters = Counters(version, {"model": 1}, len(of_ranks))
    snapshots = [TrainerSnapshot({"model": one}, counters) for one in of_ranks]
    return [write_snapshot(one, folder, rank) for rank, one in enumerate(snapshots)]


LEFT, RIGHT = ((0, 4), (0, 2)), ((0, 4), (2, 3))


@pytest.mark.parametrize(
    "of_ranks",
    [
        [deal([fragment()], rank, 5) for rank in range(5)],
        [[fragment(box=LEFT)], [fragment(box=RIGHT)]],
        [[fragment(box=LEFT, length=3)], [fragment(box=RIGHT)], [fragment(box=LEFT, start=3)]],
        [[], [fragment()]],
    ],
    ids=["stretches", "columns", "stretches of columns", "a rank without any"],
)
def test_parts_of_ranks_make_whole_parameters(of_ranks: list[list[Fragment]], tmp_path: Path) -> None:
    verify(tmp_path, write(tmp_path, *of_ranks))
    reader = CheckpointReader(tmp_path)
    for kind, shift in (("value", 0), ("exp_avg", 100), ("exp_avg_sq", 200)):
        assert torch.equal(reader.full("model/w", kind), torch.arange(12.0).view(4, 3) + shift)
    assert reader.num_updates("model", ["w"]) == reader.num_updates("model", []) == 7
    mine = [fragment(box=((1, 3), (0, 3)), start=2, length=3)]
    for tensor in mine[0].values.values():
        tensor.zero_()
    reader.fill("model", mine)
    assert mine[0].values["value"].tolist() == [5.0, 6.0, 7.0]


def test_fragments_of_one_buffer_are_copied_in_one_piece() -> None:
    flat = torch.arange(30.0)
    live = [
        Fragment(
            "w",
            (10,),
            ((0, 10),),
            0,
            {kind: flat[i * 10 : i * 10 + 10] for i, kind in enumerate(("value", "exp_avg", "exp_avg_sq"))},
            1,
        )
    ]
    (copied,) = TrainerSnapshot({"model": live}, Counters(0, {}, 1)).fragments["model"]
    assert len({one.untyped_storage().data_ptr() for one in copied.values.values()}) == 1
    flat.zero_()
    assert copied.values["exp_avg"].tolist() == list(range(10, 20))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """With other metadata, of the same length if numbers keep their digits."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = json.loads(header["__metadata__"]["penstock"])
    change(metadata)
    header["__metadata__"]["penstock"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


DAMAGES = {
    "cut off": (lambda folder: cut(folder / "trainer_00001.safetensors"), r"_00001.*has (\d+) bytes of (\d+)"),
    "nearly empty": (
        lambda folder: (folder / "trainer_00001.safetensors").write_bytes(b"123"),
        r"_00001.*has 3 bytes of \d+",
    ),
    "no header": (
        lambda folder: (folder / "trainer_00001.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}"),
        r"_00001.*first 2 bytes cannot be read",
    ),
    "missing": (
        lambda folder: (folder / "trainer_00001.safetensors").unlink(),
        r"files of 1 ranks are there, and 2 ranks wrote \(missing: \[1\]\)",
    ),
    "all missing": (lambda folder: [path.unlink() for path in folder.iterdir()], r"0 files .* at least 1 is needed"),
    "newer": (
        lambda folder: rewrite(folder / "trainer_00000.safetensors", lambda metadata: metadata.update(format=3)),
        r"_00000.*has format 3, and this Penstock reads formats up to 2",
    ),
    "of another checkpoint": (
        lambda folder: rewrite(folder / "trainer_00001.safetensors", lambda metadata: metadata.update(version=9)),
        r"_00001.*has version 9 of 2 ranks, and trainer_00000.safetensors has version 1 of 2",
    ),
    "with another shape": (
        lambda folder: rewrite(
            folder / "trainer_00001.safetensors",
            lambda metadata: metadata["parameters"]["model/w/6"].update(shape=[3, 4]),
        ),
        r"model/w is \(3, 4\) in the file of rank 1, and \(4, 3\)",
    ),
    "a gap": (
        lambda folder: write(folder, [fragment(length=6)], [fragment(start=7, length=5)]),
        "have 11 elements of model/w, which has 12, and some are not there",
    ),
    "an overlap": (
        lambda folder: write(folder, [fragment(length=6)], [fragment(start=5, length=7)]),
        "have 13 elements of model/w, which has 12, and some overlap",
    ),
    "overlapping boxes": (
        lambda folder: write(folder, [fragment(box=LEFT)], [fragment(box=((0, 4), (1, 2)), length=4)]),
        "have 12 elements of model/w, which has 12, and some overlap",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_path_both_numbers_and_a_remedy(damage: str, tmp_path: Path) -> None:
    write(tmp_path, *(deal([fragment()], rank, 2) for rank in range(2)))
    spoil, words = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=words) as refused:
        CheckpointReader(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert any(word in str(refused.value) for word in ("Resume", "Name the folder"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, r"has \d+ bytes of \d+"),
        (flip, "checksum is 0x.* and 0x.* was written"),
        (Path.unlink, "2 files were written"),
    ],
)
def test_files_are_compared_with_what_was_written(spoil: Callable, words: str, tmp_path: Path) -> None:
    files = write(tmp_path, [fragment(length=6)], [fragment(start=6, length=6)])
    verify(tmp_path, files)
    spoil(tmp_path / files[1].name)
    with pytest.raises(CheckpointError, match=words) as refused:
        verify(tmp_path, files)
    assert str(tmp_path / files[1].name) in str(refused.value)
    assert "earlier checkpoint" in str(refused.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            "adapters",
            "policy",
            r"28 trained parameters of the model, and this trainer has 24.*is not there in the check",
        ),
        ("critic", "policy", r"parameters of the critic, and this trainer has 0.*not there in the trainer"),
        ("policy", "critic", r"has 0 trained parameters of the critic, and this trainer has \d+"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(
    mine: str, theirs: str, words: str, policy: str, tmp_path: Path
) -> None:
    saved(trainer_of(policy, **KINDS[mine]), tmp_path)
    with pytest.raises(CheckpointError, match=words) as refused:
        trainer_of(policy, **KINDS[theirs]).restore(str(tmp_path))
    assert str(tmp_path) in str(refused.value)
    assert "Resume with the model" in str(refused.value)


def test_a_full_disk_says_how_far_the_file_is(tmp_path: Path) -> None:
    counters = Counters(1, {"model": 1}, 1)
    (tmp_path / "trainer_00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"\d+ of \d+ bytes were written: .*No space left.* Make space"):
        write_snapshot(TrainerSnapshot({"model": [fragment()]}, counters), tmp_path, 0)
