"""How files are named and where they are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = ("actors", "conf", "dataflow", "envs", "kernels", "platform", "rollout", "trainer", "weights")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def names_like_the_standard_library(paths: list[Path]) -> list[Path]:
    """Those of `paths`, relative to the root, whose file or subfolder is named like a standard module."""
    return [
        path
        for path in paths
        if any(Path(part).stem in sys.stdlib_module_names - {"__init__"} for part in path.parts[1:])
    ]


def test_the_folder_platform_has_no_init_file_and_of_all_folders_only_conf_has_one() -> None:
    inits = [path.relative_to(ROOT).as_posix() for path in python_files(*PROJECT) if path.name == "__init__.py"]
    assert inits == ["conf/__init__.py"]
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    files = [path.relative_to(ROOT) for path in python_files(*PROJECT, "benchmarks", "examples")]
    assert names_like_the_standard_library(files) == []
    planted = [Path("dataflow/queue.py"), Path("envs/json/schema.py"), Path("platform/run/run.py")]
    assert names_like_the_standard_library(planted) == planted[:2]


def test_the_package_holds_one_relative_link_per_folder_and_nothing_else() -> None:
    package = ROOT / "src" / "penstock"
    entries = {path.name for path in package.iterdir()} - {"__pycache__"}
    assert entries == {"__init__.py", "py.typed", *PROJECT}
    assert {name: (package / name).readlink().as_posix() for name in PROJECT} == {
        name: f"../../{name}" for name in PROJECT
    }


def test_decision_records_are_numbered_and_at_most_60_lines() -> None:
    """A number is that of a file, or of a decision that another one contains, as its line `Status:` says."""
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    heads = [path.read_text(encoding="utf-8").splitlines()[:4] for path in records]
    status = [line for head in heads for line in head if line.startswith("Status:")]
    contained = re.findall(r"\b\d{4}\b", "\n".join(status))
    numbers = sorted(map(int, [*(path.name[:4] for path in records), *contained]))
    assert numbers == list(range(1, len(numbers) + 1))
    assert [path.name for path in records if len(path.read_text(encoding="utf-8").splitlines()) > 60] == []


def test_tests_that_start_ray_or_vllm_lie_where_make_looks_for_them() -> None:
    (line,) = (
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "INTEGRATION :=" in line
    )
    marked = [path for path in python_files("tests") if "pytest.mark." + "integration" in path.read_text("utf-8")]
    elsewhere = [path for path in marked if "/".join(path.relative_to(ROOT).parts[:2]) not in line.split()]
    assert len(marked) > 10
    assert [path.name for path in elsewhere] == ["small_run.py"], "whose marks are on tests in tests/integration"
