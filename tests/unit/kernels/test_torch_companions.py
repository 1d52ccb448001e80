"""CUDA builds of torchvision and its like beside a CPU build of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch loads them")

NEEDS_ITS_OPERATORS = """
import torch
@torch.library.register_fake("torchvision::nms")
def _(dets, scores, iou_threshold):
    return dets
"""


def package(folder: Path, name: str, version: str, content: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(content)
    (folder / name / "version.py").write_text(f"__version__ = '{version}'\n")


def run(folder: Path, program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.full
def test_without_penstock_such_a_torchvision_cannot_be_imported(tmp_path: Path) -> None:
    package(tmp_path, "torchvision", "0.28.0+cu130", NEEDS_ITS_OPERATORS)
    assert "operator torchvision::nms does not exist" in run(tmp_path, "import torchvision")


def test_a_cuda_build_is_imported_and_its_operators_say_that_they_are_missing(tmp_path: Path) -> None:
    package(tmp_path, "torchvision", "0.28.0+cu130", NEEDS_ITS_OPERATORS)
    program = (
        "import penstock, torch, torchvision; box = torch.zeros(1, 4); torch.ops.torchvision.nms(box, box[0], 0.5)"
    )
    assert "NotImplementedError: Could not run 'torchvision::nms'" in run(tmp_path, program)


def test_looking_for_it_imports_no_torch(tmp_path: Path) -> None:
    package(tmp_path, "torchvision", "0.28.0+cu130", NEEDS_ITS_OPERATORS)
    program = (
        "import penstock, sys, importlib.util as util; util.find_spec('torchvision'); print('torch' in sys.modules)"
    )
    assert run(tmp_path, program) == "False\n"


@pytest.mark.parametrize("name", ["torchaudio", "torchcodec"])
def test_packages_for_sound_and_video_are_hidden_if_they_are_built_for_cuda(tmp_path: Path, name: str) -> None:
    package(tmp_path, name, "2.11.1+cu132", "raise OSError('Could not load this library')")
    asked = f"import penstock, importlib.util; print(importlib.util.find_spec('{name}')); import {name}"
    output = run(tmp_path, asked)
    assert output.startswith("None\n")
    assert "ModuleNotFoundError" in output


def test_builds_that_fit_are_left_alone(tmp_path: Path) -> None:
    for name in ("torchvision", "torchaudio", "torchcodec"):
        package(tmp_path, name, "0.28.0+cpu", f"print('this is {name}')")
    output = run(tmp_path, "import penstock, sys, torchvision, torchaudio, torchcodec; print(len(sys.meta_path))")
    assert output.splitlines()[:3] == ["this is torchvision", "this is torchaudio", "this is torchcodec"]


@pytest.mark.full
def test_what_is_installed_here_lets_transformers_and_vllm_import_their_models(tmp_path: Path) -> None:
    for program in (
        "import penstock; from transformers.models.llama import modeling_llama; print('imported')",
        "import vllm.v1.engine.core; from vllm.model_executor.models import qwen2_vl; print('imported')",
    ):
        assert "imported" in run(tmp_path, program), program
