"""`penstock algorithms`: prints the choices of the `algorithm` section from the catalog, or one of them in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint
from penstock.platform.config.compose import compose_all
from penstock.platform.config.field_errors import accepted_choice, descriptions, expectation
from penstock.platform.config.overrides import CONF_DIR, find_groups
from penstock.platform.config.presets import preset_of
from penstock.trainer.algorithms.catalog import KINDS, Entry, entries, find, is_import_path, own
from penstock.trainer.config import AlgorithmConfig

_ARXIV_DIGITS = 9
_VARIANTS = ("advantage", "loss", "correction")
"""Kinds whose choices have settings of their own."""
_SYMBOLS = (
    "b, p, c, r: behavior, proximal, target, reference logprob; ρ = exp(c − p); w = exp(p − b); A advantage; R reward; "
    "n_i tokens of N sequences. Papers: docs/paper_index.md."
)


def run_algorithms(name: str | None, kind: str | None, console: Console) -> int:
    """Print one preset, name or function, or the table of one kind or of all; returns the exit code.

    Raises:
        ConfigError: If the name or the kind is unknown.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError([f"--kind {kind} is unknown. Kinds: {', '.join(KINDS)}.{nearest_hint(kind, KINDS)}"])
    groups = find_groups([CONF_DIR])
    presets = groups["algorithm"]
    listed = own(name) if name is not None and is_import_path(name) else entries()
    found = [one for one in listed if name in (None, one.name) and kind in (None, one.kind)]
    if name in presets and kind is None:
        _print_preset(name, console)
    elif not found:
        named = {one.name for one in entries() if kind in (None, one.kind)}
        known, of_kind = (sorted({*presets, *named}), "") if kind is None else (sorted(named), f" of kind {kind}")
        hint = nearest_hint(str(name), known)
        if name in presets:
            hint = f" It is a preset, which has parts of several kinds: `penstock algorithms {name}` shows them."
        raise ConfigError([f"{name}: there is no algorithm of this name{of_kind}.{hint}"])
    else:
        for shown in dict.fromkeys(one.kind for one in found):
            console.print(_catalog_table([one for one in found if one.kind == shown], shown))
        for one in found if name is not None else ():
            if one.is_own:
                _print_settings("settings and metrics", list(_declared_settings(one)), console)
            elif one.kind in _VARIANTS and one.name in groups[f"algorithm/{one.kind}"]:
                chosen = accepted_choice(f"algorithm/{one.kind}", one.name)
                rows = _variant_settings(_composed(chosen), (one.kind,))
                _print_settings(f"settings, with {chosen}", list(rows), console)
    console.print(f"where: file in trainer/algorithms. {_SYMBOLS}", style="dim", markup=False)
    return 0


def is_arxiv(text: str) -> bool:
    """Whether a text is an arXiv id such as `2402.03300`."""
    digits = text.replace(".", "")
    return len(digits) == _ARXIV_DIGITS and digits.isdigit()


def _print_preset(name: str, console: Console) -> None:
    """Formulas of the parts, settings with their sources, and what differs from the paper."""
    preset, algorithm = preset_of(name), _composed(f"algorithm={name}")
    console.print(Text(f"algorithm={name}", style="bold"))
    console.print(preset.summary, markup=False)
    console.print(f"Paper: {preset.paper}", markup=False)
    console.print(_catalog_table(parts_of(algorithm), "formulas", first="kind"))
    rows = [(key, value, text) for key, (value, text) in preset.settings.items()]
    rows += [row for row in _variant_settings(algorithm, _VARIANTS) if row[0] not in preset.settings]
    _print_settings("settings", rows, console)
    for one in preset.differences:
        console.print(f"Differs: {one}", markup=False)
    console.print()


def parts_of(algorithm: AlgorithmConfig) -> list[Entry]:
    """The entries of the catalog that an algorithm is composed of."""
    parts = [find("advantage", algorithm.advantage.name), algorithm.loss_entry, *algorithm.correction.entries]
    parts += [find("proximal", algorithm.proximal), find("aggregation", algorithm.aggregation)]
    if algorithm.kl.coefficient:
        parts.append(find("kl", algorithm.kl.estimator))
    if algorithm.needs_critic:
        parts.append(find("loss", "value"))
    if algorithm.overlong.mode == "penalty":
        parts.append(find("reward_shaping", "overlong_penalty"))
    return parts


def _composed(override: str) -> AlgorithmConfig:
    config = compose_all(["experiment=arithmetic", *override.split()]).config
    assert config is not None, "the overrides are ours"
    return config.algorithm


def _variant_settings(algorithm: AlgorithmConfig, kinds: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Key, value and meaning of the settings of the chosen variants."""
    sections = {f"algorithm.{kind}": getattr(algorithm, kind) for kind in kinds if kind != "correction"}
    if "correction" in kinds:
        sections |= {f"algorithm.correction.{name}": one for name, one in algorithm.correction.chain.items()}
    for path, section in sections.items():
        meanings = descriptions(type(section))
        for key, value in section.model_dump(mode="json", exclude={"type"}).items():
            yield f"{path}.{key}", "null" if value is None else str(value), meanings[key]


def _declared_settings(entry: Entry) -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of what a user's function has declared: settings and metrics."""
    fields = {} if entry.settings is None else entry.settings.model_fields
    for key, field in fields.items():
        if key != "type":
            default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
            text = " ".join((field.description or "").split())
            yield f"algorithm.{entry.kind}.args.{key}", default, f"{text} ({expectation(field)})"
    for key, text in entry.metrics.items():
        yield f"loss/measured/{key}", "", text


def _print_settings(title: str, rows: Sequence[tuple[str, str, str]], console: Console) -> None:
    columns = (Column(one, overflow="fold") for one in ("key", "value", "meaning and source"))
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    if rows:
        console.print(table)


def _catalog_table(entries: Sequence[Entry], title: str, first: str = "") -> Table:
    """Rows of the catalog; with a first column of their kind if they are of several."""
    headings = (*([first] if first else []), "name", "formula", "source", "where")
    columns = (Column(one, overflow="fold") for one in headings)
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for one in entries:
        source = f"arXiv {one.source}" if is_arxiv(one.source) else one.source
        cells = (one.name, one.formula, source, PurePosixPath(one.file).name)
        table.add_row(*map(Text, (*([one.kind] if first else []), *cells)))
    return table
