"""Print what share of the product's lines a tier has run, and of those of the full tier, if both were measured.

python -m tests.coverage_of_tiers .coverage-test [.coverage-test-full]
"""

from __future__ import annotations

import sys
from pathlib import Path

import coverage

HERE = Path(__file__).parent
SHOWN = 25


def lines_of(folder: Path) -> dict[str, tuple[set[int], set[int]]]:
    """File -> the lines that were run, and all that could be."""
    measured = coverage.Coverage(data_file=str(folder / "combined"), config_file=str(HERE / "coverage.ini"))
    measured.combine([str(file) for file in folder.glob("data.*")], strict=False, keep=True)
    measured.save()
    found: dict[str, tuple[set[int], set[int]]] = {}
    for package in sorted((HERE.parent / "src" / "penstock").iterdir()):  # links to the folders of the repository
        for file in sorted(package.resolve().rglob("*.py")):
            _, lines, _, missing, _ = measured.analysis2(str(file))
            found[str(file.relative_to(HERE.parent))] = (set(lines) - set(missing), set(lines))
    return found


def main(folder: Path, of_all: Path | None = None) -> None:
    mine = lines_of(folder)
    wanted = {name: run for name, (run, _) in lines_of(of_all).items()} if of_all else {}
    wanted = wanted or {name: lines for name, (_, lines) in mine.items()}
    missing = {name: wanted[name] - run for name, (run, _) in mine.items()}
    num_wanted = sum(map(len, wanted.values()))
    num_missing = sum(map(len, missing.values()))
    for name in sorted(missing, key=lambda name: -len(missing[name]))[:SHOWN]:
        print(f"{len(missing[name]):5} of {len(wanted[name]):5} lines are not run: {name}")
    what = f"those that {of_all} ran" if of_all else "all"
    print(f"{folder}: {1 - num_missing / num_wanted:.1%} of {num_wanted} lines ({what})")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
