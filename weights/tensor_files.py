"""The tensors of a Hugging Face folder, read one at a time, and a second folder of the same form, written so.

The files are mapped, and a tensor is written before the next one is read. So a model takes as much memory as its
largest tensor, however large its files are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penstock.weights.hf_folder import CONFIG_FILE, transformers_config, weight_files

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, a little-endian integer."""


class TensorFiles:
    """The tensors in the safetensors files of a model.

    A tied tensor, such as a head that is the embedding, is in some folders under one of its names and in others under
    both. Here each folder has both.

    Attributes:
        folder: Where they are.
        config: Its config.json, with the defaults of transformers.
        files: The safetensors files.
        names: Of the tensors in the files.

    Raises:
        ValueError: If a file is missing, damaged, or not in the form of transformers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = transformers_config(folder / CONFIG_FILE)
        self.files = weight_files(folder)
        self._held_by: dict[str, Any] = {}
        for file in self.files:
            held: Any = safe_open(file, framework="pt", device="cpu")
            for name in held.keys():  # noqa: SIM118 - safe_open is no mapping
                if name in self._held_by:
                    raise ValueError(f"{file}: {name} is in another file of {folder}, too. Remove one of the files.")
                self._held_by[name] = held
        self.names = frozenset(self._held_by)
        self._tied: dict[str, str] = {}
        self._other_name: dict[str, str] = {}
        if getattr(self.config, "tie_word_embeddings", False):
            import transformers

            of_class = [getattr(transformers, one, None) for one in self.config.architectures or ()]
            tied = [getattr(one, "_tied_weights_keys", None) for one in of_class]
            self._tied = {name: first for one in tied if isinstance(one, dict) for name, first in one.items()}
            self._other_name = self._tied | {first: name for name, first in self._tied.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.names or self._other_name.get(name) in self.names

    def first_name(self, name: str) -> str:
        """The name of a tensor that both names of a tied one have in common."""
        return self._tied.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as safetensors names it, e.g. `BF16`."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """A tensor, mapped from its file."""
        tensor: torch.Tensor = self._held_by[self._name(name)].get_tensor(self._name(name))
        return tensor

    def _slice(self, name: str) -> Any:
        return self._held_by[self._name(name)].get_slice(self._name(name))

    def _name(self, name: str) -> str:
        return name if name in self.names else self._other_name[name]


def write_like(model: TensorFiles, folder: Path, tensor_of: Callable[[str], torch.Tensor]) -> None:
    """Write safetensors files with the names, shapes, dtypes and distribution over files of another model.

    The headers are those of its files, and only the data are new. `safetensors.torch.save_file` would need all
    tensors of a file in memory.

    Args:
        model: The other model.
        folder: Where to write; exists.
        tensor_of: Name -> its tensor; of the other model's shape and dtype.
    """
    for file in model.files:
        with file.open("rb") as source, (folder / file.name).open("xb") as target:
            length = source.read(_LENGTH_BYTES)
            header = source.read(int.from_bytes(length, "little"))
            target.write(length + header)
            places = {name: one["data_offsets"] for name, one in json.loads(header).items() if "data_offsets" in one}
            for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
                tensor = tensor_of(name)
                assert tensor.nbytes == end - begin, f"{name} has {tensor.nbytes} bytes instead of {end - begin}"
                target.write(raw_bytes(tensor).numpy().data)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as `uint8`, whatever its dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
