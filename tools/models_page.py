"""docs/reference/models.md, from the results of the tests of families of models.

    PENSTOCK_TESTS=full pytest -m "" --junitxml=families.xml tests/unit/trainer/test_model_forms.py \
        tests/contract/test_model_families.py -k "test_a_family or every_version"
    python tools/models_page.py families.xml > docs/reference/models.md
"""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

_INTRO = """# Families of models, as tested

<!-- Rendered: python tools/models_page.py families.xml > docs/reference/models.md (its docstring has the tests) -->

A tiny model of each family, with random weights, on two CPU cores. **Trainer**: its logprobs and gradients in the
rows of the trainer equal those of plain transformers, one sequence after another, to 1e-5 in float32
(`tests/unit/trainer/test_model_forms.py`). **Engine**: vLLM's CPU build against the trainer, the largest difference of
a logprob in nats, in bfloat16 the mean, over four versions, three of which arrived while a request was answered
(`tests/contract/test_model_families.py`); of a mixture with replayed experts. A dash: not tested.

| family | rows | head | attention | experts | trainer | engine |
|---|---|---|---|---|---|---|
"""


def page(results: ElementTree.Element) -> str:
    """The page, from a report of pytest in JUnit's form."""
    rows: dict[str, dict[str, str]] = {}
    for case in results.iter("testcase"):
        found = re.fullmatch(r"(\w+)\[(.+)\]", case.get("name", ""))
        passed = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        if found is None or not passed:
            continue
        row = rows.setdefault(found[2], {})
        row |= {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        if found[1] == "test_a_family_is_computed_as_its_tiny_instance_chooses":
            row["trainer"] = "equal"
    columns = ("rows", "head", "attention", "experts", "trainer", "engine")
    lines = [
        f"| {family} | {' | '.join(row.get(name, '–') for name in columns)} |" for family, row in sorted(rows.items())
    ]
    return _INTRO + "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(page(ElementTree.parse(sys.argv[1]).getroot()))
