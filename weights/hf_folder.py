"""The Hugging Face folder of a model: where it is, what its config.json says, and whether its weights are complete.

Only files are read; no weights are loaded. Problems are raised as `ValueError` with a sentence that begins with the
file.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.weights.counted_model import counted
from penstock.weights.model_config import ModelShape

CONFIG_FILE = "config.json"
_INDEX_FILE = "model.safetensors.index.json"
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_MAX_HUB_NAME = 200
"""Above the Hub's own limit, and below that of a file's name."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, a little-endian integer."""


def hub_cache() -> Path:
    """The model cache of huggingface_hub, located by its own environment variables."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    # Its own function, which leaves `~` where it is for a user without a home.
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE", Path(home) / "hub")))  # noqa: PTH111


def local_path(path: str) -> Path | None:
    """An existing file or directory, with `~` expanded; None if there is none, or there can be none of that name."""
    try:
        local = Path(path).expanduser()
        return local if local.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null character, no such user
        return None


def model_folder(path: str) -> Path | None:
    """The local folder of a model: `path` itself if it is a directory, or the snapshot of a hub name in the cache."""
    local = local_path(path)
    if local is not None:
        return local if local.is_dir() else None
    if not is_hub_name(path):
        return None
    repository = hub_cache() / f"models--{path.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    if revision and (repository / "snapshots" / revision / CONFIG_FILE).exists():
        return repository / "snapshots" / revision
    found = sorted(repository.glob(f"snapshots/*/{CONFIG_FILE}"), key=lambda one: one.stat().st_mtime)
    return found[-1].parent if found else None


def is_hub_name(path: str) -> bool:
    """Whether a path that does not exist looks like a name on the Hub: one slash, and no such parent directory."""
    return len(path) <= _MAX_HUB_NAME and bool(_HUB_NAME.match(path)) and local_path(path.partition("/")[0]) is None


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: If it cannot be read, or holds something else.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a directory; a file with a JSON object is expected there.")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    if not data.strip():
        raise ValueError(f"{file} is empty ({len(data)} bytes); a JSON object is expected. Restore the file.")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError(
            f"{file} begins with a byte order mark (EF BB BF), which transformers does not accept. Save it as UTF-8 "
            "without one."
        )
    try:
        value = json.loads(data.decode(), object_hook=_special_float)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}. Save it as UTF-8."
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}. Restore the file.") from error
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not an argument
            f"{file} holds a {type(value).__name__} where a JSON object is expected. Restore the file."
        )
    return value


def _special_float(found: dict[str, Any]) -> Any:
    """The float that transformers writes as `{"__float__": "Infinity"}`, since JSON has none; else the object."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def transformers_config(file: Path) -> Any:
    """The configuration in a config.json, with the defaults of transformers' own class.

    Raises:
        ValueError: If the file cannot be read, or transformers has no such model, or refuses a value.
    """
    raw = read_json_object(file)
    import transformers

    model_type = raw.get("model_type")
    if model_type is None:
        raise ValueError(f"{file} has no model_type, so it is not known which model it describes. Restore the file.")
    if model_type not in transformers.CONFIG_MAPPING:
        own_code = " Code from a model's repository (trust_remote_code) is not run." if "auto_map" in raw else ""
        raise ValueError(
            f"{file}: model_type={model_type!r} is not among the {len(transformers.CONFIG_MAPPING)} that transformers "
            f"{transformers.__version__} knows.{own_code} Use a model that it knows."
        )
    try:
        return copy.deepcopy(_config_of(model_type, json.dumps(raw)))
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{file}: transformers' {model_type} refuses it, {type(error).__name__}: {said}") from error


@lru_cache(maxsize=8)
def _config_of(model_type: str, raw: str) -> Any:
    """transformers' configuration of a JSON object: `from_dict` formats all of it for a log line, which takes 35 ms."""
    import transformers

    return transformers.CONFIG_MAPPING[model_type].from_dict(json.loads(raw))


def shape_of(hf_config: Any, file: Path) -> ModelShape:
    """The dimensions of a model from its transformers configuration; of a multimodal one, of its text model.

    Raises:
        ValueError: If a dimension is missing or not positive.
    """
    text = hf_config.get_text_config(decoder=True)

    def first(*names: str) -> Any:
        return next((value for name in names if (value := _largest(text, name)) is not None), None)

    hidden_size, num_heads = first("hidden_size"), first("num_attention_heads")
    inner, head_dim = first("intermediate_size", "ffn_hidden_size"), first("head_dim")
    experts = first("num_experts", "num_local_experts", "n_routed_experts") or 0
    try:
        if head_dim is None:
            head_dim = hidden_size // num_heads
        used = first("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k") or 1
        of_class = counted(text, used / experts if experts else 1.0)
        if of_class is not None and not of_class.has_experts:  # a configuration may have sizes of absent layers
            experts = 0
        expert_size = (first("moe_intermediate_size") or inner) if experts else 0
        shared_size = first("shared_expert_intermediate_size") or (first("n_shared_experts") or 0) * (expert_size or 0)
        if experts:
            inner = used * expert_size + shared_size
        return ModelShape(
            vocab_size=text.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size if inner is None else inner,
            num_layers=text.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=first("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            tie_word_embeddings=bool(hf_config.tie_word_embeddings),
            attention_bias=bool(first("attention_bias")) or text.model_type.startswith("qwen2"),
            qk_norm=text.model_type.startswith(("qwen3", "gemma3", "olmo2")),
            num_experts=experts,
            expert_size=expert_size,
            shared_expert_size=shared_size if experts else 0,
            **({} if of_class is None else of_class.sizes),
        )
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{file} ({text.model_type}): {wrong}.") from error
    except (AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"{file}: the dimensions of a decoder cannot be read from model_type={hf_config.model_type!r}: {error}. "
            "Use a decoder-only language model."
        ) from error


def _largest(text: Any, name: str) -> Any:
    """A value of a configuration; of one that layers do not share the largest, since memory is estimated from it."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers': it is one of each layer
        value = [getattr(text.per_layer_config[index], name) for index in range(text.num_hidden_layers)]
    return max(value) if isinstance(value, list | tuple) and value else value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model's weights, each complete by its own header.

    Raises:
        ValueError: If there are none, or one is missing or truncated.
    """
    index = folder / _INDEX_FILE
    if index.exists():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{index} has no weight_map, so it is not known where the tensors are. Restore the file.")
        files = sorted({folder / str(name) for name in names.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(folder.glob("*.bin"))
        only = f" It has {pickles[0].name}, a pickle: convert it to safetensors." if pickles else ""
        raise ValueError(f"{folder} has no *.safetensors: there are no weights in it.{only}")
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{missing[0]} does not exist: {len(missing)} of the {len(files)} weight files that {index.name} names are "
            "missing. Copy or download the model again."
        )
    for file in files:
        _check_complete(file)
    return files


def _check_complete(file: Path) -> None:
    """Compare a safetensors file's size with its header.

    Raises:
        ValueError: With both sizes.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or header_bytes > size - _LENGTH_BYTES:
                needed = _LENGTH_BYTES + header_bytes if size >= _LENGTH_BYTES else _LENGTH_BYTES
                raise ValueError(
                    f"{file} has {size} bytes, but needs {needed} for its header alone: it is truncated or no "
                    "safetensors file. Copy or download the model again."
                )
            header = json.loads(stream.read(header_bytes))
            ends = _ends(header.values() if isinstance(header, dict) else ())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file} has no safetensors header: {error}. Copy or download the model again.") from error
    needed = _LENGTH_BYTES + header_bytes + max(ends, default=0)
    if size != needed:
        raise ValueError(
            f"{file} has {size} bytes, but its header describes {needed}: it is "
            f"{'truncated' if size < needed else 'damaged'}. Copy or download the model again."
        )


def _ends(entries: Iterable[Any]) -> list[int]:
    """Where each tensor of a header ends, bytes; the entry of metadata has no offsets."""
    return [int(entry["data_offsets"][1]) for entry in entries if "dtype" in entry]
