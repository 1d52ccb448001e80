"""Imports the object that an import path in YAML names, with errors that name the part that does not resolve."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from penstock.dataflow.errors import ConfigError


def load_object(path: str, key: str = "import path") -> Any:
    """Import what `path` names: `pkg.mod:name` or `pkg.mod.name`, names may be nested (`pkg.mod:Class.method`).

    Args:
        path: The import path.
        key: Its configuration key, for the message.

    Raises:
        ConfigError: If a part does not resolve; the message names the part and the nearest match.
    """
    where = f"{key}={path!r}"
    module_path, colon, names = path.partition(":")
    parts = [*module_path.split("."), *names.split(".")] if colon else path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{where} is no import path. Write `package.module:name` or `package.module.name`.")
    num_modules = module_path.count(".") + 1 if colon else len(parts) - 1
    target: Any = None
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        if index < num_modules:
            try:
                target = importlib.import_module(name)
                continue
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise ConfigError(_import_failed(where, name, error)) from error
                if target is None or colon or not hasattr(target, part):
                    raise ConfigError(_not_found(where, name, target)) from None
                num_modules = index  # the remaining parts are names in a module
            except Exception as error:  # user code runs here: anything it raises is a config problem
                raise ConfigError(_import_failed(where, name, error)) from error
        try:
            target = getattr(target, part)
        except AttributeError:
            hint = nearest_hint(part, [*dir(target), *_submodules(target)])
            owner = ".".join(parts[:index])
            raise ConfigError(f"{where}: {owner} has no attribute {part!r}.{hint}") from None
    return target


def import_extra(library: str) -> Any:
    """Import a library of the extra `envs`.

    Raises:
        ConfigError: If it cannot be imported.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        name = library.replace("_", "-")
        message = (
            f"env: {name} cannot be imported by {sys.executable} ({error}). Install it: pip install 'penstock[envs]'."
        )
        raise ConfigError(message) from error


def call_problem(function: Callable[..., Any], call: str, /, *arguments: Any, **named: Any) -> str:
    """Why a function cannot be called with these arguments, `call` in words; empty if it can, or has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin, or one of an extension module
        return ""
    try:
        signature.bind(*arguments, **named)
    except TypeError as problem:
        return f"takes {signature}, but would be called with {call}: {problem}"
    return ""


def _import_failed(where: str, name: str, error: Exception) -> str:
    return f"{where}: importing {name} raised {type(error).__name__}: {error}"


def _not_found(where: str, name: str, parent: ModuleType | None) -> str:
    part = name.rpartition(".")[2]
    if parent is None:
        theirs = {module.name for module in pkgutil.iter_modules()} - sys.stdlib_module_names
        hint = nearest_hint(part, theirs)
        return f"{where}: no module {name!r} on the import path. Install it or add its folder to PYTHONPATH.{hint}"
    if hasattr(parent, part):
        return f"{where}: {name} is no module. The colon follows the module: `{parent.__name__}:{part}...`."
    hint = nearest_hint(part, [*_submodules(parent), *dir(parent)])
    return f"{where}: {parent.__name__} has no module or attribute {part!r}.{hint}"


def _submodules(parent: object) -> list[str]:
    if not isinstance(parent, ModuleType) or not hasattr(parent, "__path__"):
        return []
    return [module.name for module in pkgutil.iter_modules(parent.__path__)]


def nearest_hint(name: str, candidates: Iterable[str]) -> str:
    """` Did you mean '...'?` with the candidate closest to `name`, or nothing if none is close."""
    public = sorted({candidate for candidate in candidates if not candidate.startswith("_")})
    matches = get_close_matches(name, public, n=1, cutoff=0.75)
    return f" Did you mean {matches[0]!r}?" if matches else ""
