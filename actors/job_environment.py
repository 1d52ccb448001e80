"""What the workers of a joined cluster get from the driver: environment variables, and the user's modules.

The raylets of a cluster were started by someone else, in other folders and with other variables, and their workers
inherit those. With `cluster.address=local` workers inherit from the driver, and nothing here is needed.
"""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

from penstock.dataflow.errors import ConfigError

_BEGINNINGS = (
    "CUDA_", "FI_", "GLOO_", "HF_", "NCCL_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "UCX_", "VLLM_", "WANDB_",
)  # fmt: skip
_PROXIES = frozenset(("http_proxy", "https_proxy", "no_proxy", "all_proxy"))
_WITHHELD = (
    "CUDA_VISIBLE_DEVICES",  # Ray sets it for each worker
    "VLLM_HOST_IP",  # differs between nodes
    "WANDB_API_KEY",  # only the driver writes to W&B, and Ray's dashboard shows the variables of a job
)
MAX_SHIPPED_BYTES = 100 << 20
"""Largest total of the files that are sent to every node."""
_NOT_CODE = (
    ".?*",  # not the root, which is matched as "."
    "__pycache__", "venv", "node_modules", "runs", "outputs", "multirun", "wandb",
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.parquet", "*.arrow",
)  # fmt: skip
"""Patterns, as in .gitignore, of what is not sent: hidden files, environments, results, models and data sets."""
_MIB = 1 << 20


def passed_variables(environment: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The driver's variables that workers need too.

    Args:
        environment: The driver's.
        named: Further variables, which the configuration names, such as that of a judge's key.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in named or name.lower() in _PROXIES or (name.startswith(_BEGINNINGS) and name not in _WITHHELD)
    }


def user_locations(modules: Iterable[str]) -> list[Path]:
    """File or folder of each top-level module that is not installed, so that other nodes may lack it.

    A package that is installed in editable mode is one, since only a link to its folder is installed.

    Args:
        modules: Names of modules that can be imported here.
    """
    paths = sysconfig.get_paths()
    own = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = [Path(path).resolve() for path in (*own, *site.getsitepackages(), site.getusersitepackages())]
    found: dict[Path, None] = {}
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        spec = None if name == "penstock" or name in sys.stdlib_module_names else importlib.util.find_spec(name)
        if spec is None:
            continue
        folders = spec.submodule_search_locations
        for location in map(Path, folders if folders is not None else filter(None, [spec.origin])):
            if not any(location.resolve().is_relative_to(folder) for folder in installed):
                found[location.absolute()] = None
    return list(found)


@contextmanager
def shipped_folder(locations: Collection[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """Ray's runtime environment that brings the user's modules to every node.

    Ray packs and uploads them in `ray.init`, unpacks them on each node, and makes the result the working directory and
    the first entry of the import path of every worker. It has all files of the driver's working directory if a module
    is in it, because user code may open files by relative paths, and all modules beside the others, which may import
    one another. `.gitignore` and `.rayignore` are respected.

    Args:
        locations: Of `user_locations`.
        folder: The driver's working directory.

    Yields:
        Fields of the runtime environment; they may be used only within the context. Empty without `locations`.

    Raises:
        ConfigError: If there are more than `MAX_SHIPPED_BYTES`.
    """
    if not locations:
        yield {}
        return
    roots = dict.fromkeys(location.parent for location in locations)
    with tempfile.TemporaryDirectory(prefix="penstock-modules-") as staging:
        for root in sorted(roots, key=lambda root: root != folder):
            for entry in sorted(root.iterdir()):
                link = Path(staging) / entry.name
                is_importable = entry.suffix == ".py" or (entry.is_dir() and any(entry.glob("*.py")))
                is_environment = (entry / "pyvenv.cfg").exists()
                if not link.exists() and (root == folder or is_importable) and not is_environment:
                    link.symlink_to(entry)
        _check_size(Path(staging), list(roots))
        yield {"working_dir": staging, "excludes": list(_NOT_CODE)}


def _check_size(staging: Path, roots: Collection[Path]) -> None:
    sizes = Counter[str]()
    for file in _files(staging, [_get_excludes(staging, list(_NOT_CODE))]):
        sizes[file.relative_to(staging).parts[0]] += file.stat().st_size
        if sizes.total() > MAX_SHIPPED_BYTES:
            largest = ", ".join(f"{name} {size / _MIB:.0f} MiB" for name, size in sizes.most_common(3))
            raise ConfigError(
                f"cluster.address: the modules that the configuration names are in {', '.join(map(str, roots))}, which "
                f"is sent to every node of the cluster, and has more than {MAX_SHIPPED_BYTES // _MIB} MiB. The largest "
                f"so far: {largest}. Name what is no code in a .gitignore or .rayignore there, start the run in a "
                "folder that has only your code, or install your code as a package on every node."
            )


def _files(path: Path, excludes: list[Callable[[Path], bool]]) -> Iterator[Path]:
    """The files that Ray packs, by its own rules."""
    if not path.is_dir():
        if path.is_file() and not any(is_excluded(path) for is_excluded in excludes):
            yield path
        return
    here = [*excludes, *get_excludes_from_ignore_files(path, include_gitignore=True)]
    if not any(is_excluded(path) for is_excluded in here):
        for entry in path.iterdir():
            yield from _files(entry, here)
