"""Every algorithm by kind and name, from the decorator of its function. Imports no torch.

A loss is one file of losses/: its settings, its formula as a function, and `@Entry` with its source and what must be
known about it. A YAML file, conf/algorithm/loss/NAME.yaml, makes it a choice of the configuration. Corrections and
advantages are the same in corrections.py and advantages.py. A function of your own may have the decorator, too:
`algorithm/loss=custom algorithm.loss.function=pkg.module:function`.

`penstock algorithms` prints the entries, docs/paper_index.md lists them, the checks of a configuration use them, and
training calls their functions. The modules here are imported when the first entry is looked up. Commands that
start no run do not need torch, so these modules import it inside functions.

Symbols: trajectory i of a group of G with reward R_i; sampled token t, n_i of them; N sequences of a batch;
behavior, proximal, target, reference logprobs b, p, c, r; ρ = exp(c − p); w = exp(p − b); sg = stop-gradient.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.settings import Settings
from penstock.envs.import_path import load_object

if TYPE_CHECKING:
    from penstock.trainer.algorithms.conditions import Deviation
    from penstock.trainer.config import AlgorithmConfig

Kind = Literal[
    "advantage", "loss", "correction", "kl", "entropy", "controller", "aggregation", "proximal", "reward_shaping",
    "token_weighting", "auxiliary_loss",
]  # fmt: skip
Level = Literal["token", "sequence", "pair", "group", "batch"]
"""The data from which one number is computed."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Function = TypeVar("Function", bound=Callable[..., Any])
_PACKAGE = "penstock.trainer.algorithms"
_REGISTERED: list[Entry] = []


class Variant(Settings):
    """Base of all settings here."""


class Named(Variant):
    """Settings of a loss or an advantage of the catalog."""

    type: str = ""
    """Its name; a user's own function has an import path instead."""

    @property
    def name(self) -> str:
        """Its name in the catalog."""
        return self.type


def is_import_path(name: str) -> bool:
    """`pkg.mod:name` or `pkg.mod.name`."""
    return "." in name or ":" in name


def _import_path(value: str) -> str:
    if not is_import_path(value):
        raise ValueError("name a function as package.module:function")
    return value


class Custom(Variant):
    """A function of the user's own."""

    type: Literal["custom"] = "custom"
    """Always `custom`."""
    function: Annotated[str, AfterValidator(_import_path)]
    """Import path of the function, `package.module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its settings. A function with `@Entry` says which it has, and gets them checked; any other finds these in
    `config.args`."""

    @property
    def name(self) -> str:
        """The import path, which is its name in the catalog."""
        return self.function


def not_loaded(*_: object) -> None:
    """In place of a function that cannot be imported."""
    raise AssertionError("the checks of a configuration refuse a function that cannot be imported")


@dataclass(frozen=True)
class Entry:
    """One algorithm; as a decorator it enters a function. Its formula is the first code in the function's docstring."""

    kind: Kind
    settings: type[BaseModel] | None = None
    """Section of the configuration that chooses a loss or an advantage (`Named`), or holds the settings of a correction
    or of a user's own function."""
    _: KW_ONLY
    source: str = "–"
    """arXiv id, or author and year."""
    name: str = ""
    """Default: the function's."""
    formula: str = ""
    """One line, in the symbols of the module."""
    level: Level = "token"
    """The data from which one number is computed; of a correction with a weight, one weight."""
    takes_weight: bool = True
    """Of a loss: False if it uses the behavior logprobs itself, or needs no correction."""
    has_ratio: bool = True
    """Of a loss: whether it contains ρ, which at proximal=behavior is the ratio to the behavior policy."""
    needs_advantages: bool = True
    """Of a loss: without advantages (or pairs) its gradient is 0."""
    is_plain_at_one: bool = False
    """Of a loss: where ρ is 1, its gradient is that of `reinforce`."""
    has_one_term: bool = False
    """Of a loss: all tokens of a sequence have the same term."""
    is_weight: bool = False
    """Of a correction: whether it has a weight (at most one in a chain); the others only mask."""
    masks_sequences: bool = False
    """Of a correction: whether it masks whole sequences."""
    reads_advantages: bool = False
    """Of a correction: whether it masks only answers of negative advantage."""
    compares_proximal: bool = False
    """Of a correction: whether it masks by p − b alone, which is 0 at proximal=behavior."""
    select: Callable[[Any, Any], Any] | None = None
    """`(BatchTokens, settings) -> [T] bool`, of what compares all tokens of a batch (`level="batch"`): those that it
    acts on, which it finds in `LossTokens.selection` under the name of its function."""
    selected_learn: bool = False
    """Whether selected tokens have a gradient without an advantage, too."""
    refused: Callable[[AlgorithmConfig], Iterable[str]] = lambda _: ()
    """One sentence for each combination with its settings that cannot work."""
    deviations: tuple[Deviation, ...] = ()
    """Combinations that its paper argues against."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Name -> meaning, of what a loss measures of each token (`PolicyLoss.measured`)."""
    function: Callable[..., Any] = not_loaded

    def __call__(self, function: Function) -> Function:
        """Enter a function."""
        name, text = self.name or function.__name__, function.__doc__ or ""
        formula = self.formula or " ".join(text.partition("`")[2].partition("`")[0].split())
        _REGISTERED.append(replace(self, name=name, formula=formula, function=function))
        return function

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own function, named by its import path."""
        return is_import_path(self.name)

    @property
    def file(self) -> str:
        """Where it is computed, relative to the repository; of a user's own function, its import path."""
        module = self.function.__module__.removeprefix("penstock.")
        return self.name if self.is_own else f"{module.replace('.', '/')}.py"

    def load(self) -> Callable[..., Any]:
        """The function.

        Raises:
            ConfigError: If the import path does not resolve to something callable.
        """
        return _load_own(self.kind, self.name) if self.function is not_loaded else self.function


@cache
def entries() -> tuple[Entry, ...]:
    """All of Penstock, by kind; losses in the order of their files."""
    from penstock.trainer.algorithms import advantages, aggregation, controllers, corrections, kl, proximal

    del advantages, aggregation, controllers, corrections, kl, proximal  # they were imported for their entries
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "losses")]):
        importlib.import_module(f"{_PACKAGE}.losses.{module.name}")
    ours = [entry for entry in _REGISTERED if entry.function.__module__.startswith(_PACKAGE)]
    return tuple(sorted(ours, key=lambda entry: KINDS.index(entry.kind)))


@cache
def _by_name() -> dict[tuple[Kind, str], Entry]:
    return {(entry.kind, entry.name): entry for entry in entries()}


def find(kind: Kind, name: str) -> Entry:
    """The entry of that kind and name; a user's function without one is assumed to work on tokens, or groups."""
    if not is_import_path(name):
        return _by_name()[kind, name]
    try:
        function = _load_own(kind, name)
    except ConfigError:
        function = not_loaded
    level: Level = "group" if kind == "advantage" else "token"
    unknown = Entry(kind, formula="the user's own", level=level, function=function)
    return replace(next((entry for entry in _declared(function) if entry.kind == kind), unknown), name=name)


def own(name: str) -> list[Entry]:
    """What a user's function of this import path says about itself.

    Raises:
        ConfigError: If the import path does not resolve, or the function has no `@Entry`.
    """
    found = [replace(entry, name=name) for entry in _declared(load_object(name))]
    if not found:
        raise ConfigError([f"{name} has no @Entry (penstock.trainer.algorithms.catalog), so nothing is known of it."])
    return found


def _declared(function: object) -> list[Entry]:
    return [entry for entry in _REGISTERED if entry.function is function]


def _load_own(kind: Kind, name: str) -> Callable[..., Any]:
    key = f"algorithm.{kind}"
    target = load_object(name, key)
    if not callable(target):
        raise ConfigError([f"{key}={name!r} is not callable, but a {type(target).__name__}. Name a function."])
    return cast("Callable[..., Any]", target)


def names(kind: Kind) -> list[str]:
    """Names of one kind, in the order of the catalog."""
    return [entry.name for entry in entries() if entry.kind == kind]


def known(kind: Kind) -> Callable[[str], str]:
    """A validator of a configuration key that names one of `kind`; the error reads like that of a Literal."""

    def check(name: str) -> str:
        if (kind, name) not in _by_name():
            expected = ", ".join(names(kind))
            raise PydanticCustomError("literal_error", "must be one of {expected}", {"expected": expected})
        return name

    return check


def sections(kind: Kind) -> Any:
    """The union of the settings of one kind, told apart by `type`, with those of a user's own function."""
    settings = dict.fromkeys(entry.settings for entry in entries() if entry.kind == kind and entry.settings is not None)
    return Annotated[Union[(*settings, Custom)], Field(discriminator="type")]
