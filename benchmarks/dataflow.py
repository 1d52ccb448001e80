"""Groups per second and peak memory of the dataflow beside TransferQueue's, on the same work over Ray on this machine.

    python benchmarks/dataflow.py [--rounds 3] [--groups 4096]

The work: groups of 8 trajectories of 2,048 tokens. Generation workers write ids, mask and behavior logprobs; a scoring
worker reads the ids and writes rewards; two logprob workers read them and write proximal and reference logprobs; two
trainer ranks read every field of their half of each batch of 128 groups and sum every byte (both sides must find the
same sum). At most 384 groups are under way (max_staleness 2). Both sides have a driver, these seven workers, the same
numpy code inside (dataflow_work.py), the same batches and the same window; what lies between the workers differs.

TransferQueue gets an environment of its own (.bench/transferqueue-venv, made once, with Penstock's pins of torch, numpy
and ray) and its best setting from a sweep made first: number of storage units and groups per call. Groups per call are
swept for our side too. Given by hand: its SimpleStorage (the default; openYuanrong 0.8.1 was several times slower
here, MooncakeStore needs libibverbs, RayStore needs nixl), its metadata interface, fields as regular tensors, one torch
thread per process (there are more processes than cores). The sides run alternately, each round in fresh processes: a
warm-up, one round on the clock, another in which memory is sampled, so that sampling costs no time. Other work on the
machine slows both sides; the load average is kept beside each round, and CPU time per group, which it hardly touches.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alone import BENCH, ROOT, make_environment, run_alone
from dataflow_report import report
from dataflow_work import Work, expected_checksum
from provenance import provenance
from rich.console import Console

HERE = Path(__file__).parent
TRANSFERQUEUE = "TransferQueue==0.1.11"
SHARED_PINS = ("torch", "numpy", "ray[default]")
CALL_GROUPS = (8, 16, 32, 64)
STORAGE_UNITS = (1, 2, 4)
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Side:
    """One side in its environment.

    Attributes:
        settings: Its own, beyond what both share.
    """

    name: str
    python: Path
    timeout_s: float
    settings: dict[str, int] = field(default_factory=dict)

    def run(self, label: str, works: list[Work], *, memory: bool) -> dict[str, Any]:
        """One start of this side: results of each work, versions, and what others had of the cores."""
        spec, out = (BENCH / f"dataflow-{self.name}{suffix}" for suffix in (".spec.json", ".json"))
        spec.write_text(json.dumps({"works": [asdict(work) for work in works], "memory": memory, **self.settings}))
        command = [self.python, HERE / f"dataflow_{self.name}.py", spec, out]
        others_percent = run_alone(f"dataflow-{self.name}-{label}", command, self.timeout_s)
        return {**json.loads(out.read_text()), "others_percent": others_percent}


def tuned(candidates: list[Side], work: Work, call_groups: tuple[int, ...]) -> tuple[Side, Work, list[dict[str, Any]]]:
    """The candidate and the groups per call that are fastest, and the whole sweep."""
    works = [replace(work, call_groups=number) for number in call_groups]
    tried: list[tuple[float, Side, Work]] = []
    for side in candidates:
        for result, work in zip(side.run("sweep", works, memory=False)["results"], works, strict=True):
            tried.append((result["groups_per_s"], side, work))
            setting = ", ".join(f"{key}={value}" for key, value in {**side.settings, **calls(work)}.items())
            console.print(f"{side.name}, {setting}: {result['groups_per_s']:.0f} groups/s")
    _, side, work = max(tried, key=lambda entry: entry[0])
    return side, work, [{**side.settings, **calls(work), "groups_per_s": speed} for speed, side, work in tried]


def calls(work: Work) -> dict[str, int]:
    return {"call_groups": work.call_groups}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="starts of each side, alternating")
    parser.add_argument("--groups", type=int, default=4096, help="groups of a round, a multiple of 128")
    parser.add_argument("--sweep-groups", type=int, default=512, help="groups of each setting of the sweep")
    parser.add_argument("--call-groups", type=int, nargs="+", default=CALL_GROUPS, help="swept; divisors of 64")
    parser.add_argument("--storage-units", type=int, nargs="+", default=STORAGE_UNITS, help="swept for TransferQueue")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="longest time for one start")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    started, limit_s = time.monotonic(), arguments.timeout_s
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {pin.partition("==")[0]: pin for pin in project["dependencies"]}
    python = make_environment(BENCH / "transferqueue-venv", [*(pins[name] for name in SHARED_PINS), TRANSFERQUEUE])
    candidates = {
        "penstock": [Side("penstock", Path(sys.executable), limit_s)],
        "transferqueue": [
            Side("transferqueue", python, limit_s, {"num_storage_units": number}) for number in arguments.storage_units
        ],
    }
    small, work = Work(num_groups=arguments.sweep_groups), Work(num_groups=arguments.groups)
    best = {name: tuned(sides, small, tuple(arguments.call_groups)) for name, sides in candidates.items()}
    expected = expected_checksum(work)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in best}
    for number in range(1, arguments.rounds + 1):
        for name, (side, tuned_work, _) in best.items():
            ran = side.run(f"round-{number}", [replace(work, **calls(tuned_work))], memory=True)
            result = ran.pop("results")[0] | ran
            if result["checksum"] != expected:
                raise SystemExit(f"{name}: the trainer ranks read the sum {result['checksum']}, written was {expected}")
            rounds[name].append(result)
            console.print(f"round {number}, {name}: {result['groups_per_s']:.0f} groups/s, load {result['load']:.1f}")
    report(
        console,
        {
            "work": asdict(work) | {"num_bytes": work.num_bytes, "window": work.window},
            "settings": {name: {**side.settings, **calls(tuned_work)} for name, (side, tuned_work, _) in best.items()},
            "sweep": {name: sweep for name, (_, _, sweep) in best.items()},
            "rounds": rounds,
            "provenance": provenance(),
            "command": ["benchmarks/dataflow.py", *sys.argv[1:]],
            "wall_s": round(time.monotonic() - started),
        },
    )


if __name__ == "__main__":
    main()
