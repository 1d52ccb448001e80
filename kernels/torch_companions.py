"""Lets the CUDA builds of torchvision, torchaudio and torchcodec be installed beside a CPU build of torch.

vLLM's CPU build requires all three, and PyPI has their CUDA builds only. Such a torch cannot load their libraries, so
importing them fails, and with them every model of transformers, which imports what is installed. torchaudio and
torchcodec are hidden then. torchvision, which models that also take images need, is imported with the names of its
operators: its Python files need no more, and calling an operator raises torch's NotImplementedError. Builds that fit
are left alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
_POOLED = "SymInt pooled_height, SymInt pooled_width"
_INPUT_SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
_ALIGN = f"float spatial_scale, {_POOLED}, int sampling_ratio"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_ALIGN}, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, {_POOLED}, {_INPUT_SHAPE}, "
    "int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, float spatial_scale, {_POOLED}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, {_POOLED}, {_INPUT_SHAPE}) "
    "-> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_ALIGN}) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ALIGN}, {_INPUT_SHAPE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, {_POOLED}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, {_POOLED}, "
    f"{_INPUT_SHAPE}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORM}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""Of all operators of torchvision 0.28, as its C++ files declare them."""
_declared: list[Any] = []
"""torch forgets what a library has declared with the library."""


def mend_imports() -> None:
    """Hide what cannot be imported, and have torchvision's operators declared when it is. Imports none of them."""
    if is_for_cuda("torch"):
        return
    for name in HIDDEN:
        if name not in sys.modules and is_for_cuda(name):
            sys.modules[name] = None  # type: ignore[assignment] # Python's own mark for "not to be found"
    if "torchvision" not in sys.modules and is_for_cuda("torchvision"):
        sys.meta_path.insert(0, _Declaring())


def vllm_plugin() -> None:
    """Called by vLLM in each of its processes before it imports a model; importing this has mended them."""


def is_for_cuda(name: str) -> bool:
    """Whether an installed package was built for CUDA, by its `version.py`; False if it has none."""
    spec = PathFinder.find_spec(name)
    if spec is None or spec.origin is None or not (file := Path(spec.origin).with_name("version.py")).exists():
        return False
    mark = r"""^__version__ = ['"].*\+cu\d|^cuda\b[^=\n]*= ['"]"""  # the second: a torch built from source
    return re.search(mark, file.read_text(encoding="utf-8"), re.MULTILINE) is not None


class _Declaring:
    """Finds torchvision, whose operators are declared before it is executed, and not while it is only looked for.

    A finder of `sys.meta_path` without its base class: importing `importlib.abc` takes 11 ms, in every process.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def declare_and_execute(module: ModuleType) -> None:
                if not _declared:
                    _declare()
                execute(module)

            spec.loader.exec_module = declare_and_execute  # type: ignore[method-assign]
        return spec


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _declared.append(library)
