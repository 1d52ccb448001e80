"""What a preset of `algorithm` says about itself: the comments of conf/algorithm/NAME.yaml.

The head of the file has its purpose, the paper (`# Paper: …`) and each difference from it (`# Differs: …`). Further
lines of one of these are indented. Beside each value stands its meaning and, in brackets, its source: a section of that
paper, of another one, or `ours`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.platform.config.overrides import CONF_DIR

_SETTING = re.compile(
    r"^(?P<indent> *)(?:- (?:override )?)?(?P<key>[a-z_]+):(?P<value>(?: [^#\s]\S*)*)(?: +# (?P<text>.*))?$"
)
_ARXIV = re.compile(r"arXiv \d{4}\.\d{5}")


@dataclass(frozen=True, slots=True)
class Preset:
    """One file of conf/algorithm."""

    summary: str
    """What it is for."""
    paper: str
    """Where it is published, with the section; empty for a part of an algorithm."""
    differences: list[str]
    """How it differs from the paper, one sentence or more each."""
    settings: dict[str, tuple[str, str]]
    """`algorithm/loss` or `algorithm.mini_batches` -> value and the text beside it."""


def read_preset(path: Path) -> Preset:
    """Read one file of conf/algorithm, or of a group in it, alone."""
    head: list[str] = []
    settings: dict[str, tuple[str, str]] = {}
    section, prefix = "", ".".join(("algorithm", *path.relative_to(CONF_DIR / "algorithm").parent.parts))
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            if line.startswith("#   "):
                head[-1] += f" {line[1:].strip()}"
            else:
                head.append(line[1:].strip())
            continue
        match = _SETTING.match(line)
        if match is None or match["key"] == "type":
            continue
        key, value = match["key"], match["value"].strip()
        if not match["indent"]:
            section = "" if value else key
        if value and section == "defaults":
            settings[f"{prefix}/{key}"] = value, match["text"] or ""
        elif value and value != "{}":
            inner = f"{section}.{key}" if match["indent"] else key
            settings[f"{prefix}.{inner}"] = value, match["text"] or ""
    return Preset(
        summary=head[0],
        paper="".join(line.removeprefix("Paper: ") for line in head if line.startswith("Paper: ")),
        differences=[line.removeprefix("Differs: ") for line in head if line.startswith("Differs: ")],
        settings=settings,
    )


def preset_of(name: str) -> Preset:
    """A preset with the settings of the files that it is composed of; those name the paper that they are from."""
    folder = CONF_DIR / "algorithm"
    own = read_preset(folder / f"{name}.yaml")
    settings = own.settings
    if name != "grpo":
        base = read_preset(folder / "grpo.yaml")
        arxiv = _ARXIV.search(base.paper)
        assert arxiv is not None, "the base has a paper"
        inherited = {
            key: (value, text.replace("[section", f"[{arxiv[0]}, section"))
            for key, (value, text) in base.settings.items()
        }
        settings = inherited | settings
    for key, (value, _) in list(settings.items()):
        if "/" in key:
            settings |= read_preset(folder / key.partition("/")[2] / f"{value}.yaml").settings
    return replace(own, settings=settings)
