"""The table of what combines with what is that of the contract cases."""

from __future__ import annotations

from pathlib import Path

from tools.parallelism_table import table

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "parallelism.md"


def test_the_page_has_the_table_of_the_contract_cases() -> None:
    assert table() in PAGE.read_text(), "python -m tools.parallelism_table"
