"""Scripts that users start by name run: none hides a package of its name, and their imports work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/results/*.md")]
SCRIPT_FOLDERS = (ROOT / "benchmarks", ROOT / "examples", ROOT)
AS_IN_TRLS_ENVIRONMENT = """
import sys, types
sys.path.insert(0, "benchmarks")
for name in ("penstock", "torchvision", "torchaudio", "torchcodec"):  # not installed there
    sys.modules[name] = None
trl = types.ModuleType("trl")
trl.GRPOConfig = trl.GRPOTrainer = object
sys.modules["trl"] = trl
import trl_grpo
import transformers.integrations.hub_kernels
"""


IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, "benchmarks")
for name in sys.argv[1:]:
    importlib.import_module(name)
import transformers.integrations.hub_kernels
"""


def named_in_documents() -> list[Path]:
    """Benchmarks that documents tell a reader to start."""
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    names = {name for text in texts for name in re.findall(r"python benchmarks/(\w+\.py)", text)}
    return [ROOT / "benchmarks" / name for name in sorted(names)]


@cache
def names_of_packages() -> frozenset[str]:
    """Modules that are installed, and those that transformers imports if they can be found."""
    transformers = find_spec("transformers")
    assert transformers is not None
    assert transformers.origin is not None
    source = (Path(transformers.origin).parent / "utils" / "import_utils.py").read_text(encoding="utf-8")
    optional = re.findall(r'_is_package_available\(\s*"([\w.]+)"', source)
    assert "kernels" in optional
    return frozenset({name.partition(".")[0] for name in optional} | packages_distributions().keys()) - {"penstock"}


def named_like_a_package(scripts: list[Path]) -> list[str]:
    """A script's folder comes first on its path: code that imports the package gets the script."""
    return [path.name for path in scripts if path.stem in names_of_packages()]


def test_no_script_is_named_like_a_package_that_others_import() -> None:
    scripts = [path for folder in SCRIPT_FOLDERS for path in sorted(folder.glob("*.py"))]
    assert len(scripts) > 20
    assert named_like_a_package(scripts) == []
    planted = [Path("benchmarks/kernels.py"), Path("examples/datasets.py"), Path("benchmarks/weights.py")]
    assert named_like_a_package(planted) == ["kernels.py", "datasets.py"]


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [["benchmarks/vs_trl.py", "--help"], ["-c", AS_IN_TRLS_ENVIRONMENT]],
    ids=["make bench", "the side of TRL"],
)
def test_what_make_bench_starts_can_be_imported(program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program], cwd=ROOT, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


READS_THE_DEMO = """
import itertools, json, sys
sys.path.insert(0, "benchmarks")
import vs_trl
from penstock.platform.checks.load import compose_config
vs_trl.islice = lambda stream, count: itertools.islice(stream, 2)
vs_trl.BENCH = vs_trl.Path(sys.argv[1])
print(json.dumps(vs_trl.trl_spec(compose_config(["experiment=arithmetic"]), "policy", 1)))
"""


@pytest.mark.full
def test_make_bench_gives_trl_each_setting_that_its_side_reads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS_THE_DEMO, tmp_path],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    read = set(re.findall(r'spec\["(\w+)"\]', (ROOT / "benchmarks" / "trl_grpo.py").read_text(encoding="utf-8")))
    assert len(read) > 10
    of_others = {"micro_batch", "eval_tasks", "eval_every"}  # the sweep, time_to_accuracy.py
    assert read - json.loads(done.stdout).keys() == of_others


@pytest.mark.full
def test_every_benchmark_that_documents_name_can_be_imported() -> None:
    scripts = named_in_documents()
    assert len(scripts) > 8
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *(script.stem for script in scripts)],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize(
    "script",
    [script for script in named_in_documents() if "ArgumentParser" in script.read_text(encoding="utf-8")],
    ids=lambda script: script.stem,
)
def test_every_benchmark_that_documents_name_prints_its_arguments(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=ROOT, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
