"""The way of a trajectory and of a publish through the package stays short (docs/adr/0031-fewer-hops.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.way import traced_run, way, windows_of_publishes, windows_of_trajectories

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
MAX_FILES_OF_TRAJECTORY, MAX_FILES_OF_PUBLISH = 64, 25
MAX_LINES = 700
"""Of a file: a short way of long files is no gain."""


def test_the_way_through_the_files_is_not_longer_than_it_was(tmp_path: Path) -> None:
    records = traced_run(ROOT, tmp_path)
    of_trajectory = way(records, list(windows_of_trajectories(records))[1:])
    of_publish = way(records, list(windows_of_publishes(records))[1:])
    assert 20 < len(of_trajectory.files) <= MAX_FILES_OF_TRAJECTORY, str(of_trajectory)
    assert 10 < len(of_publish.files) <= MAX_FILES_OF_PUBLISH, str(of_publish)
    lines = {file: len((ROOT / file).read_text().splitlines()) for file in {*of_trajectory.files, *of_publish.files}}
    assert [file for file, num_lines in lines.items() if num_lines > MAX_LINES] == []
