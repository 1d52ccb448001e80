"""`model.shape` of a checkpoint is read from its config.json, so that `model.path` alone names a model.

The config.json is that of the model's folder, of the local Hugging Face cache, or, for the public models that
`conf/model/` names, the one in this package: they can be planned before they are downloaded. A shape in YAML is used
for a model that is made from scratch, and for one that a warm start will make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.metrics.leaves import value_at
from penstock.platform.metrics.run_files import CONFIG_FILE as RUN_CONFIG_FILE
from penstock.platform.metrics.run_files import POLICY_FOLDER
from penstock.weights.hf_folder import (
    CONFIG_FILE,
    hub_cache,
    is_hub_name,
    local_path,
    model_folder,
    shape_of,
    transformers_config,
)
from penstock.weights.model_config import ModelShape

SECTIONS = ("model", "partner.model")
_OTHERS = ("reference", "teacher", "critic")
"""Sections of models that are not trained from their own shape."""
_MAX_SHOWN = 120
_UNKNOWN = ModelShape(
    vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1
)
"""Stands in for a shape that cannot be read, so that the other keys are still checked."""


def packaged_config(path: str) -> Path | None:
    """The config.json of a public model in this package."""
    file = CONF_DIR / "model" / "public" / f"{path}.json"
    is_name = path.count("/") == 1 and ".." not in path and not path.startswith(("/", "."))
    return file if is_name and file.is_file() else None


def policy_of_run(path: str) -> Path | None:
    """The policy that a run has saved, if the path is the directory of one."""
    local = local_path(path)
    if local is None or not local.is_dir():
        return None
    policy, is_run = Path(path) / POLICY_FOLDER, (local / RUN_CONFIG_FILE).is_file()
    return policy if is_run and not (local / CONFIG_FILE).exists() and (policy / CONFIG_FILE).is_file() else None


def config_file(path: str) -> Path | None:
    """Where the config.json of `model.path` is; None if it is not known. The file itself need not be readable."""
    folder = model_folder(path)
    if folder is not None:
        return folder / CONFIG_FILE if (folder / CONFIG_FILE).exists() else None
    return packaged_config(path)


def fill_shapes(raw: dict[str, Any], typed: Mapping[str, str], remarks: list[str]) -> dict[str, str]:
    """Set the shapes in composed values to those of the checkpoints; a path may begin with `~`, or be that of a run.

    Args:
        raw: Composed values, changed here.
        typed: Dotted key -> the override as typed.
        remarks: Gets a sentence for each path of a run, whose policy is meant.

    Returns:
        Dotted key -> what is wrong with it.
    """
    wrong: dict[str, str] = {}
    for name in (*SECTIONS, *_OTHERS):
        section = value_at(raw, name.split("."))
        if not isinstance(section, dict):
            continue
        path = section.get("path")
        if isinstance(path, str) and path.startswith("~") and (local := local_path(path)):
            path = section["path"] = str(local)  # processes that load it do not expand it
        if isinstance(path, str) and (policy := policy_of_run(path)) is not None:
            section["path"] = str(policy)
            remarks.append(f"{name}.path={path} is the directory of a run; its policy is taken, {policy}")
        if name in SECTIONS:
            wrong |= _fill(section, name, typed)
    return wrong


def _fill(section: dict[str, Any], name: str, typed: Mapping[str, str]) -> dict[str, str]:
    path = section.get("path")
    if section.get("from_scratch") or not isinstance(path, str):
        return {}
    file = config_file(path)
    if file is None:
        if "shape" in section:
            return {}  # of a policy that is still to be made; checks/model_files.py says what is missing
        section["shape"] = _UNKNOWN.model_dump()
        return {f"{name}.path": not_here(f"{name}.path", path)}
    try:
        shape = shape_of(transformers_config(file), file).model_dump()
    except ValueError as problem:
        section.setdefault("shape", _UNKNOWN.model_dump())
        return {f"{name}.path": f"{name}.path={path}: {problem}"}
    stated = section.get("shape")
    if f"{name}.shape" in typed and not isinstance(stated, dict):
        return {}  # the schema says what it must be
    wrong = {}
    for key, found in shape.items():
        full = f"{name}.shape.{key}"
        given = stated.get(key, found) if isinstance(stated, dict) else found
        if full in typed and given != found:
            wrong[full] = (
                f"{full}={json.dumps(given)} differs from the checkpoint's {json.dumps(found)} ({name}.path, {file}). "
                f"The shape of a checkpoint is read from there. Leave {full} out, or use model.from_scratch=true to "
                "make a new model."
            )
    unknown = {key: value for key, value in stated.items() if key not in shape} if isinstance(stated, dict) else {}
    section["shape"] = shape | unknown
    return wrong


def not_here(key: str, path: str) -> str:
    """The sentence about a model that is not on this machine."""
    local = local_path(path)
    if local is not None:
        if (local / RUN_CONFIG_FILE).is_file():
            return (
                f"{key}={path} is the directory of a run that has not saved its policy. Write that of a checkpoint "
                f"first: `penstock export {path} --to DIR`; or train on from it: `penstock resume {path} --as NEW`."
            )
        what = "has no config.json: it is no Hugging Face model directory" if local.is_dir() else "is a file"
        return f"{key}={path} {what}. Give the directory that holds config.json, the weights and the tokenizer."
    if not is_hub_name(path):
        shown = path if path.isprintable() else json.dumps(path)  # one line, whatever the path is
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}… ({len(path)} characters)"
        return f"{key}={shown} does not exist. Give a model directory or a hub name."
    return (
        f"{key}={path} does not exist: it is neither a directory nor in the local Hugging Face cache ({hub_cache()}), "
        f"and a run downloads nothing. Download it first: `hf download {path}`, or give a directory that has it."
    )
