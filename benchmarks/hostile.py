"""Every hostile act at every entry point, on this machine: the mechanism that contains it, and the record.

    python benchmarks/hostile.py > benchmarks/results/hostile.md

The programs are those of tests/hostile_programs.py, some of which belong to `penstock sandbox check`. The acts of
rewards, environments and tools are those of tests/hostile_acts.py, in the processes of a run with `isolation: strict`.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

from provenance import provenance
from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from penstock.envs.sandbox.config import SandboxConfig  # noqa: E402
from penstock.envs.sandbox.hostile import lay_trap, survives, try_all  # noqa: E402
from tests.hostile_acts import ACTS  # noqa: E402
from tests.hostile_play import no_process_left, play_steps_and_tools, score_rewards  # noqa: E402
from tests.hostile_programs import PROGRAMS  # noqa: E402
from tests.hostile_reaches import lay_outside  # noqa: E402

_MAX_CHARACTERS = 90
_WORDS = {True: "yes", False: "NO", None: "not run"}
_PREFIX = re.compile(r"^(env: )?(step of t/0: )?(tests\.hostile_acts:reward on 0/0 \(t/0\): )?")
_PERMISSIONS = """\
Permissions:

| | program in the sandbox | reward, environment, tool with `isolation: strict` | the same with `process`, the default |
| --- | --- | --- | --- |
| reads the environment | six harmless names | harmless names, and those granted | all but `WANDB_API_KEY` |
| reads home, `/tmp` of others | no | what is granted, or named in `args` | yes |
| opens connections | no | if granted | yes |
| writes outside its folder | no | no | yes, where the user may |
| sees or signals other processes | no | no | yes |
"""


def in_short(record: str) -> str:
    """The last line of a failure, or the text that the model gets, for one field of the table."""
    line = (_PREFIX.sub("", record).strip().splitlines() or [""])[-1].replace(str(Path.home()), "~")
    line = line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}…"
    return line.replace("|", "/") or "no harm"


async def programs() -> list[tuple[str, str, str]]:
    """`(program, contained, how it ended)`."""
    _, tried = await try_all(SandboxConfig(), PROGRAMS, isolate=True)
    return [(case.name, _WORDS[verdict.is_contained], in_short(verdict.found)) for case, verdict in tried.items()]


async def acts() -> tuple[list[tuple[str, ...]], int]:
    """`(act, mechanism, reward, step, tool)`, and the number that left a process or broke the next episode."""
    os.environ["WANDB_API_KEY"] = "secret"
    with lay_trap() as trap, lay_outside() as outside, no_process_left():
        rewards = await score_rewards(trap, outside)
        played = await play_steps_and_tools(trap, outside)
        num_bad = int(await survives(trap)) + sum(one.leaves_process or one.after != 0.5 for one in played.values())
    rows = []
    for act in ACTS:
        tool = played.get(("tool", act.name))
        records = (rewards[act.name], played["step", act.name].record)
        rows.append(
            (
                act.name,
                act.contained_by,
                *map(in_short, records),
                "not tried" if tool is None else in_short(tool.record),
            )
        )
    return rows, num_bad


def main() -> None:
    console = Console(highlight=False, soft_wrap=True, width=10_000)
    ran = asyncio.run(programs())
    committed, num_bad = asyncio.run(acts())
    lines = ["# Hostile programs, rewards, environments and tools", ""]
    num_contained = sum(contained == "yes" for _, contained, _ in ran)
    lines += [f"Programs in the sandbox: {num_contained} of {len(ran)} contained.", ""]
    lines += [
        "| program | contained | the record |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in ran),
        "",
    ]
    lines += [
        "Hostile acts in a reward, in a step of an environment, and in a tool, with `isolation: strict`:",
        f"{len(committed)} acts; {num_bad} left a process or prevented the next episode; none read, wrote or reached",
        "anything of the host. `error: …` is reported to the model, and the episode continues.",
        "",
        "| act | what contains it | record: reward | record: step | record: tool |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in committed),
        "",
        *_PERMISSIONS.splitlines(),
        "",
        "- limits: 5 s for a reward, 6 s for a step, 1.5 s for a tool, 0.25 GiB, 24 processes",
        *(f"- {line}" for line in provenance()),
        "- by: python benchmarks/hostile.py; as tests: tests/unit/envs/test_hostile.py",
    ]
    console.print(escape("\n".join(lines)))


if __name__ == "__main__":
    main()
