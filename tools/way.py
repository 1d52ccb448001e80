"""Print the way of one trajectory and of one publish through the files of the package.

    python tools/way.py                     # this checkout
    python tools/way.py --tree ../other     # another one, with this one's interpreter

A small real run (vLLM, DeepSpeed, one group in flight) is traced in all its processes. The way of a trajectory is every
file of which a function runs between the admission of its group and the first backward pass; that of a publish, from
its call to its end. What runs by a timer would be counted in one window and not in another, so a file is on the way if
it is in each of several windows. The first window, in which plans and caches are made, is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
NUM_STEPS = 6
OVERRIDES = (
    *(
        "experiment=arithmetic",
        "model.path=policy",
        "model.max_context_tokens=64",
        "rollout.sampling.max_new_tokens=12",
    ),
    *("dataflow.batch_groups=1", "dataflow.group_size=2", "dataflow.max_staleness=0"),
    "reward.fn=letters:reward",
    *("evaluation.num_tasks=1", "evaluation.every_steps=0", "weights.probe_every=0", f"total_steps={NUM_STEPS}"),
)
REWARD = """
def reward(trajectory, **_):
    return sum(place * ord(letter) for place, letter in enumerate(trajectory.response, 1)) % 1009 / 1009
"""
"""Differs between answers: members of equal rewards have no gradient."""
ADMISSION, BACKWARD, PUBLISH = ("dataflow/", "admit"), ("trainer/backends/", "backward"), ("platform/run/", "publish")
"""Start of a file's path, and the last part of the name of a function in it."""


class Record(NamedTuple):
    """One call or return."""

    time_ns: int
    event: str
    file: str
    function: str

    def is_of(self, marker: tuple[str, str]) -> bool:
        return self.file.startswith(marker[0]) and self.function.rsplit(".", 1)[-1] == marker[1]


class Way(NamedTuple):
    """Files in the order in which a function of them first runs, each with these functions."""

    files: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [
            f"{number:3}  {file}: {', '.join(names)}" for number, (file, names) in enumerate(self.files.items(), 1)
        ]
        return "\n".join(lines)


def traced_run(tree: Path, folder: Path) -> list[Record]:
    """Train in `folder` with the package of `tree`; all records, by time."""
    records, on_path = folder / "records", folder / "on_path"
    records.mkdir()
    on_path.mkdir()
    tracer = (HERE / "way_tracer.py").read_text().replace("@tree@", f"{tree}/").replace("@records@", str(records))
    (on_path / "sitecustomize.py").write_text(tracer)
    write_policy = (
        "from penstock.rollout.tokenization.tokenizers import character_tokenizer as t\n"
        "from penstock.trainer.models.tiny_policy import create_policy\n"
        "from penstock.weights.model_config import ModelConfig\n"
        "from tests.tiny_policy import tiny_shape\n"
        "shape = tiny_shape(vocab_size=len(t()), hidden_size=64, head_dim=32)\n"
        "create_policy(ModelConfig(max_context_tokens=64, shape=shape), t(), 'policy', seed=0)\n"
    )
    (folder / "letters.py").write_text(REWARD)
    package = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "OMP_NUM_THREADS": "1"}
    traced = package | {"PYTHONPATH": f"{on_path}:{tree / 'src'}"}
    main = "import sys; from penstock.platform.cli.main import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", write_policy], cwd=folder, env=package, check=True, timeout=120)
    done = subprocess.run(
        [sys.executable, "-c", main, "train", *OVERRIDES, "run_dir=run"],
        cwd=folder,
        env=traced,
        check=False,
        timeout=900,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found = [line.split(" ", 3) for file in records.iterdir() for line in file.read_text().splitlines()]
    return sorted(Record(int(time_ns), event, file, function) for time_ns, event, file, function in found)


def windows_of_trajectories(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """From each admission to the first backward pass after it; an admission after it begins the next window."""
    admitted: int | None = None
    for one in records:
        if one.event == "call" and admitted is None and one.is_of(ADMISSION):
            admitted = one.time_ns
        elif one.event == "call" and admitted is not None and one.is_of(BACKWARD):
            yield admitted, one.time_ns
            admitted = None


def windows_of_publishes(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """From the first call of each publish to its last return; a backward pass separates two publishes."""
    separators = [0, *(one.time_ns for one in records if one.is_of(BACKWARD)), sys.maxsize]
    of_publish = [one for one in records if one.is_of(PUBLISH)]
    for first, last in pairwise(separators):
        within = [one.time_ns for one in of_publish if first < one.time_ns < last]
        if within:
            yield within[0], within[-1]


def way(records: Sequence[Record], windows: Sequence[tuple[int, int]]) -> Way:
    """What runs in each of the windows, in the order of the last one."""
    functions: list[dict[str, list[str]]] = []
    for first, last in windows:
        of_window: dict[str, list[str]] = {}
        for one in records:
            if first <= one.time_ns <= last and one.function not in of_window.setdefault(one.file, []):
                of_window[one.file].append(one.function)
        functions.append(of_window)
    return Way({file: names for file, names in functions[-1].items() if all(file in each for each in functions)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="checkout whose package is traced")
    parser.add_argument("--keep", type=Path, help="folder for the run and its records; a temporary one by default")
    chosen = parser.parse_args()
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="way-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        records = traced_run(chosen.tree.resolve(), folder)
        for what, windows in (
            ("trajectory", list(windows_of_trajectories(records))[1:]),
            ("publish", list(windows_of_publishes(records))[1:]),
        ):
            found = way(records, windows)
            num_functions = sum(map(len, found.files.values()))
            print(f"{what}: {len(found.files)} files, {num_functions} functions, in each of {len(windows)} windows")
            print(found)
    finally:
        if chosen.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
