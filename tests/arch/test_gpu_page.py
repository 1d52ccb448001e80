"""docs/gpu.md names tests and steps of `make gpu-check` that exist, and leaves no step out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
PATHS = (
    "kernels",
    "varlen",
    "parity",
    "colocation",
    "sleep",
    "IPC",
    "NCCL",
    "ZeRO",
    "offload",
    "Ulysses, context parallel",
    "clusters",
    "launchers",
)


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its own heading."""
    section = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def missing_tests(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"tests/[\w/]+\.py", cell) if not (ROOT / name).is_file()]


def test_every_test_that_the_table_names_is_there() -> None:
    table = rows("What is shown without a GPU")
    assert [row[0] for row in table if not re.search(r"`tests/[\w/]+\.py`", row[1])] == []
    assert [name for row in table for name in missing_tests(row)] == []
    assert missing_tests(["`tests/unit/test_gone.py`: x"]) == ["tests/unit/test_gone.py"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_a_row_that_says_what_only_a_gpu_can_show(path: str) -> None:
    (row,) = [row for row in rows("What is shown without a GPU") if path in row[0]]
    assert len(row) == 4
    assert all(row)


def test_the_steps_are_those_of_gpu_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_check import STEPS

    names = [name for row in rows("`make gpu-check`") for name in re.findall(r"`(\w+)`", row[0])]
    assert names == [step.name for step in STEPS]
    told = [name for row in rows("What is shown without a GPU") for name in re.findall(r"`(\w+)`", row[3])]
    assert set(told) <= set(names)
    # Every path that a step shows is in the table; the model is only made for the others.
    assert set(names) - {"model"} == set(told)
