"""Metric names written in the code are declared in the catalog (platform/metrics/catalog.yaml)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from penstock.platform.metrics import hub
from penstock.platform.metrics.hub import catalog

ROOT = Path(__file__).parents[2]
PROJECT = ("actors", "dataflow", "envs", "kernels", "platform", "rollout", "trainer", "weights")
FAMILIES = {name.partition("/")[0] for name in catalog()}
NAME = re.compile(rf"({'|'.join(sorted(FAMILIES))})/[a-z0-9_/]+")


def metric_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`(line, name)` of every string `family/name`; of an f-string its constant beginning, with a trailing `*`."""
    inside_f_strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside_f_strings.update(id(part) for part in node.values)
            head = node.values[0]
            if isinstance(head, ast.Constant) and head.value.partition("/")[0] in FAMILIES and "/" in head.value:
                yield node.lineno, f"{head.value}*"
        elif id(node) not in inside_f_strings and is_metric_name(node):
            yield node.lineno, node.value


def is_metric_name(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value) is not None


def is_declared(name: str) -> bool:
    if not name.endswith(("*", "/")):
        return not hub.undeclared([name])
    prefix = name.removesuffix("*")
    return any(declared.startswith(prefix) or prefix.startswith(declared.rstrip("*")) for declared in catalog())


def undeclared(tree: ast.AST) -> list[tuple[int, str]]:
    return [(line, name) for line, name in metric_literals(tree) if not is_declared(name)]


def test_every_metric_name_in_the_code_is_declared() -> None:
    num_names = 0
    wrong = []
    for path in (path for folder in PROJECT for path in sorted((ROOT / folder).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        num_names += sum(1 for _ in metric_literals(tree))
        wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in undeclared(tree)]
    assert wrong == []
    assert num_names >= 40


def test_a_planted_name_is_found_in_plain_and_in_formatted_strings() -> None:
    tree = ast.parse(
        "a = 'reward/meen'\nb = f'loss/my_{x}'\nc = f'reward/part/{x}'\nd = 'reward/mean'\ne = 'text/html'"
    )
    assert undeclared(tree) == [(1, "reward/meen"), (2, "loss/my_*")]
