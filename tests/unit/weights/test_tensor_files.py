"""Folders of tensors are read one tensor at a time, and written in the form of another folder."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.weights.tensor_files import TensorFiles, raw_bytes, write_like
from tests.model_folder import CONFIG

TENSORS = {
    "model.embed_tokens.weight": torch.randn(32, 8).to(torch.bfloat16),
    "model.norm.weight": torch.randn(8),
    "scalar": torch.tensor(0.5, dtype=torch.float16),
    "empty": torch.zeros(0, 3),
    "turned": torch.randn(3, 5).T,
    "flags": torch.tensor([True, False, True]),
    "codes": torch.arange(6).view(2, 3).to(torch.float8_e4m3fn),
}


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], **fields: Any) -> Path:
    """A model folder with an index if there are several files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    for name, tensors in files.items():
        save_file({key: one.contiguous() for key, one in tensors.items()}, folder / name, {"format": "pt"})
    if len(files) > 1:
        places = {key: name for name, tensors in files.items() for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_a_copy_has_the_bytes_of_its_model_file_by_file(tmp_path: Path) -> None:
    names = sorted(TENSORS)
    halves = {f"model-{part}.safetensors": {name: TENSORS[name] for name in names[part::2]} for part in range(2)}
    model = TensorFiles(write(tmp_path / "model", halves))
    (tmp_path / "copy").mkdir()
    write_like(model, tmp_path / "copy", model.read)
    for file in halves:
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    assert model.names == set(names)
    assert (model.shape("turned"), model.dtype("scalar"), model.shape("scalar")) == ((5, 3), "F16", ())
    assert all(torch.equal(raw_bytes(model.read(name)), raw_bytes(TENSORS[name])) for name in names)


def test_a_tensor_is_gone_when_the_next_one_is_asked_for(tmp_path: Path) -> None:
    model = TensorFiles(write(tmp_path / "model", {"model.safetensors": TENSORS}))
    (tmp_path / "copy").mkdir()
    made: list[weakref.ref[torch.Tensor]] = []

    def doubled(name: str) -> torch.Tensor:
        assert [one for one in made[:-1] if one() is not None] == []
        tensor = model.read(name) if model.dtype(name) in ("BOOL", "F8_E4M3") else 2 * model.read(name)
        made.append(weakref.ref(tensor))
        return tensor

    write_like(model, tmp_path / "copy", doubled)
    assert len(made) == len(TENSORS)
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert torch.equal(copy["turned"], 2 * TENSORS["turned"])


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("held", [[EMBEDDING], [HEAD], [EMBEDDING, HEAD]])
def test_a_tied_tensor_has_both_of_its_names_whichever_is_in_the_file(tmp_path: Path, held: list[str]) -> None:
    value = torch.randn(32, 8)
    files = {"model.safetensors": {name: value.clone() for name in held}}
    model = TensorFiles(write(tmp_path / "tied", files))
    for name in (EMBEDDING, HEAD):
        assert name in model
        assert (model.shape(name), model.dtype(name)) == ((32, 8), "F32")
        assert torch.equal(model.read(name), value)
    assert "model.norm.weight" not in model
    untied = TensorFiles(write(tmp_path / "untied", files, tie_word_embeddings=False))
    assert [name for name in (EMBEDDING, HEAD) if name in untied] == held


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"model.safetensors": {EMBEDDING: torch.zeros(2)}})
    save_file({EMBEDDING: torch.ones(2)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: model\.embed_tokens\.weight is in another file"):
        TensorFiles(folder)
