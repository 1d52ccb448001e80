"""The wheel, installed by README's commands into an empty environment, trains the demo without the clone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(2400)]
ROOT = Path(__file__).parents[2]
SHORT = ("evaluation.num_tasks=16", "evaluation.every_steps=0")


def run(*words: str | Path, cwd: Path, timeout_s: float = 600) -> str:
    """A command in an environment that knows nothing of the clone.

    The package index is that of pip's configuration. A further index that cannot be reached, as without a network, is
    asked once for each package.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PENSTOCK"))
    } | {"PIP_QUIET": "1", "PIP_NO_INPUT": "1", "PIP_RETRIES": "0"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.skipif(torch.version.cuda is not None, reason="installs the CPU build")
def test_the_wheel_in_an_empty_environment_trains_the_demo(tmp_path: Path) -> None:
    aside = shutil.ignore_patterns(".*", "runs", "site", "build", "dist", "__pycache__")  # building leaves files
    tree, programs = tmp_path / "tree", tmp_path / "venv" / "bin"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=aside)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    (block,) = re.findall(
        r"^## Install\n\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for command in block.splitlines():
        words = shlex.split(command, comments=True)
        run(programs / "python", "-m", *words, cwd=tree, timeout_s=1500)
    shutil.rmtree(tree)
    where = run(programs / "python", "-c", "import penstock.platform as p; print(*p.__path__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path))
    run(programs / "penstock", "sft", "experiment=arithmetic_sft", "sft.max_steps=40", *SHORT, cwd=tmp_path)
    run(programs / "penstock", "train", "experiment=arithmetic", "name=demo", "total_steps=3", *SHORT, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["ledger"]["trained"]) == ("completed", 3, 96)
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
