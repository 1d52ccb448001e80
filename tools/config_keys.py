"""Each key of the configuration: what it is by default, who sets it and who reads it: python tools/config_keys.py

Set: in conf/ to another value than the default, by an experiment, in the documents, in the tests. Read: files of the
product with an attribute of that name (by name only, so a common name looks better read than it is).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from penstock.platform.config.field_errors import all_paths, locate
from penstock.platform.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
PRODUCT = ("actors", "dataflow", "envs", "kernels", "platform", "rollout", "trainer", "weights")


class Key(NamedTuple):
    """One leaf of the schema."""

    path: str
    default: Any
    experiments: list[str]
    other_conf: list[str]
    docs: int
    tests: int
    readers: list[str]


def leaves() -> list[str]:
    paths = list(all_paths())
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]


def flat(values: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        path: value
        for key, inner in values.items()
        for path, value in flat(inner, f"{prefix}.{key}".lstrip(".")).items()
    }


def set_in_conf() -> dict[str, dict[str, Any]]:
    """File below conf/ -> dotted key -> value."""
    found = {}
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        header = re.match(r"# @package (\S+)", text)
        group = path.parent.relative_to(ROOT / "conf").as_posix().replace("/", ".")
        package = header[1] if header else ("" if group == "." else group)
        values = {key: value for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"}
        found[path.relative_to(ROOT / "conf").as_posix()] = flat(values, "" if package == "_global_" else package)
    return found


def attributes() -> dict[str, set[str]]:
    readers = defaultdict(set)
    for path in (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                readers[node.attr].add(path.relative_to(ROOT).as_posix())
    return readers


def keys() -> list[Key]:
    conf, readers = set_in_conf(), attributes()
    docs = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    found = []
    for path in leaves():
        field = locate(path.split(".")).field
        default = field.get_default(call_default_factory=True, validated_data={}) if field else None
        plain = re.escape(path).replace(r"\*", r"\w+")
        setters = [name for name, values in conf.items() if any(re.fullmatch(plain, key) for key in values)]
        own = [name for name in setters if not same(conf[name], plain, default)]
        found.append(
            Key(
                path,
                default,
                [name for name in setters if name.startswith("experiment/")],
                [name for name in own if not name.startswith("experiment/")],
                len(re.findall(rf"\b{plain}\b", docs)),
                len(re.findall(rf"\b{plain}\b", tests)),
                sorted(readers[path.rpartition(".")[2]]),
            )
        )
    return found


def same(values: dict[str, Any], plain: str, default: Any) -> bool:
    mine = [value for key, value in values.items() if re.fullmatch(plain, key)]
    return all(value == default or (isinstance(default, tuple) and value == list(default)) for value in mine)


def main() -> None:
    found = keys()
    for key in found:
        setters = (
            f"experiments {len(key.experiments)} conf {len(key.other_conf):2} docs {key.docs:2} tests {key.tests:3}"
        )
        readers = f"read in {len(key.readers):2}: {', '.join(key.readers[:3])}"
        print(f"{key.path:58} {str(key.default)[:22]:22} {setters}  {readers}")
    never = [key for key in found if not key.experiments and not key.other_conf]
    print(f"{len(found)} keys of {RunConfig.__name__}; {len(never)} are set by no experiment and by no file of conf/")


if __name__ == "__main__":
    main()
