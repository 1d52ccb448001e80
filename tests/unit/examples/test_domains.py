"""The commands of examples/domains are valid, in an order in which each finds what it reads, and end in the table."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from penstock.platform.config.compose import compose_all

FOLDER = Path(__file__).parents[3] / "examples" / "domains"
PENSTOCK = """\
#!{python}
# Notes its arguments, and that what they name exists; writes what the command would write.
import json, sys
from pathlib import Path
words = sys.argv[1:]
named = {{key: value for key, _, value in (word.partition("=") for word in words)}}
read = [named[key] for key in ("model.path",) if key in named]
if words[0] == "merge":
    read += words[1 : words.index("--base")] + [words[words.index("--base") + 1]]
    Path(words[words.index("--to") + 1]).mkdir()
if words[0] in ("sft", "train"):
    Path(named["run_dir"], "policy").mkdir(parents=True)
with open("commands.jsonl", "a") as file:
    print(json.dumps([words, [one for one in read if not Path(one).exists()]]), file=file)
if words[0] == "eval":
    accuracy = 0.25 if "base" in words[2] else 0.5
    sets = {{name: {{"accuracy": accuracy, "tasks": 9}} for name in ("sums", "differences", "products")}}
    print("a line of Ray")
    print(json.dumps({{"model": named["model.path"], "sets": sets}}))
"""


def test_the_commands_of_the_domains_are_valid_and_end_in_the_table(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text(PENSTOCK.format(python=sys.executable))
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [FOLDER / "domains.sh", "here"],
        cwd=tmp_path, env=os.environ | {"PATH": path, "STEPS": "7"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    commands = [json.loads(line) for line in (tmp_path / "commands.jsonl").read_text().splitlines()]
    assert [missing for _, missing in commands if missing] == []
    typed = [words for words, _ in commands]
    assert [words[0] for words in typed] == ["sft", *["train"] * 3, *["merge"] * 4, *["eval"] * 8]
    composed = [compose_all(words[1:]) for words in typed if words[0] != "merge"]
    assert [one.problems for one in composed if one.problems] == []
    operators = [one.config.env.args["operators"] for one in composed if one.config is not None]
    assert operators == ["+-*", "+", "-", "*", *["+-*"] * 8]
    assert {one.config.total_steps for one in composed[1:4] if one.config is not None} == {7}
    assert "| base | 0.250 (0.50) | 0.250 (0.50) | 0.250 (0.50) |" in done.stdout
    assert "| merged-ties | 0.500 (1.00) | 0.500 (1.00) | 0.500 (1.00) |" in done.stdout


def test_the_guide_shows_the_commands_of_the_script() -> None:
    script = (FOLDER / "domains.sh").read_text(encoding="utf-8")
    guide = (FOLDER / "README.md").read_text(encoding="utf-8")
    shown = [shlex.split(line) for line in guide.splitlines() if line.startswith("penstock ")]
    assert {words[1] for words in shown} == {"sft", "train", "merge", "eval"}
    for words in shown:
        fixed = [word for word in words if word.startswith(("experiment=", "--method", "--density", "evaluation."))]
        assert [word for word in fixed if word not in script] == []
