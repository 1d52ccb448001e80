"""The hostile table: whatever a reward or a sandboxed program does, the run goes on and the cause is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.process_tree import descendants
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.hostile import Trap, lay_trap, survives, try_case
from penstock.envs.sandbox.hostile_cases import HOSTILE_CASES, HostileCase
from penstock.envs.sandbox.local import LocalSandbox
from penstock.envs.scoring import RewardRunner
from tests.answers import pair

CONFIG = SandboxConfig(allow_unisolated=True, max_concurrency=2)
NOT_CONTAINED_WITHOUT_ISOLATION = {
    "fills the disk", "signals the sandbox's user", "reads the host's files", "writes outside",
    "opens a socket to the host", "opens a socket to the outside", "makes a user namespace",
    "looks into its supervisor", "reads the host's environment",
}  # fmt: skip
"""These may succeed there: it depends on the rights of who runs the tests."""


@pytest.fixture(scope="module")
def trap() -> Iterator[Trap]:
    with lay_trap() as laid:
        yield laid


@pytest_asyncio.fixture(params=["isolated", "unisolated"], loop_scope="module", scope="module")
async def sandbox(request: pytest.FixtureRequest, trap: Trap) -> AsyncIterator[LocalSandbox]:
    assert trap.file.exists()  # laid before the fork server starts
    made = LocalSandbox(CONFIG, isolate=request.param == "isolated")
    isolation = await made.start()
    try:
        if request.param == "isolated" and not isolation.is_isolated:
            pytest.skip(f"this host allows no isolation: {isolation.problem}")
        yield made
    finally:
        await made.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", HOSTILE_CASES, ids=lambda case: case.name)
async def test_a_hostile_program_is_contained(sandbox: LocalSandbox, case: HostileCase, trap: Trap) -> None:
    isolation = await sandbox.start()
    verdict = await try_case(sandbox, case, trap, is_isolated=isolation.is_isolated)
    assert len(verdict.found) < 400
    if isolation.is_isolated:
        assert verdict.is_contained, verdict.found
    elif verdict.is_contained is None:
        assert case.needs_isolation
    elif not verdict.is_contained:
        assert case.name in NOT_CONTAINED_WITHOUT_ISOLATION, verdict.found
    assert not await survives(trap)


@pytest.mark.asyncio(loop_scope="module")
async def test_processor_time_is_limited_over_all_processes_and_waiting_costs_none(sandbox: LocalSandbox) -> None:
    limits = Limits(wall_s=60.0, cpu_s=0.3)
    spins = ["while True: pass", "import os\nos.fork()\nos.fork()\nwhile True: pass"]
    codes = [*spins, "import time; time.sleep(0.5)"]
    *spun, waited = await asyncio.gather(*(sandbox.run(Program(code), limits) for code in codes))
    for result in spun:
        assert (result.outcome, result.detail) == ("cpu_time", "more than 0.3 s of processor time")
    assert waited.outcome == "exited"


REWARDS = """
import asyncio, ctypes, os, signal, socket, subprocess, sys, threading, time
from pathlib import Path

class Unpicklable:
    def __reduce__(self): raise TypeError("never")
    def __repr__(self): raise RuntimeError("not even a repr")

FORGED = {"empty reply": b"{}", "reply of no object": b"[]", "reply with nan": b'{"reward": NaN, "parts": {}}',
          "reply with infinity": b'{"reward": 1.0, "parts": {"a": 1e999}}', "reply without parts": b'{"reward": 1.0}'}

def hostile(trajectory, nap="", **_):
    what = trajectory.response
    if what == "infinite loop":
        while True: pass
    if what == "ignores signals":
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        while True: time.sleep(1)
    if what == "many processes":
        for _ in range(60):
            if os.fork() == 0: time.sleep(1000)
        time.sleep(1000)
    if what == "memory bomb":
        hoard = []
        while True: hoard.append(b"x" * (8 << 20)); time.sleep(0.002)
    if what == "1 GB of output":
        for _ in range(1024): os.write(1, b"x" * (1 << 20))
        return 1.0
    if what == "os._exit": os._exit(7)
    if what == "kills itself": os.kill(os.getpid(), signal.SIGKILL)
    if what == "kills its group": os.killpg(0, signal.SIGKILL)
    if what == "crashes the interpreter": ctypes.string_at(0)
    if what == "leaves a daemon":
        subprocess.Popen(["setsid", "sh", "-c", f"sleep {nap} & exec sleep {nap}"], start_new_session=True)
        os._exit(0)
    if what == "leaves a daemon and hangs":
        subprocess.Popen(["setsid", "sh", "-c", f"sleep {nap} & exec sleep {nap}"], start_new_session=True)
        time.sleep(1000)
    if what == "writes into the socket":
        for fd in range(3, 64):
            try:
                if socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX: os.write(fd, b"\\xff" * 5000)
            except OSError: pass
        time.sleep(1000)
    if what in FORGED:
        import inspect, struct
        number = inspect.currentframe().f_back.f_back.f_locals["call_id"]
        for fd in range(3, 64):
            try:
                if socket.socket(fileno=os.dup(fd)).family == socket.AF_UNIX:
                    os.write(fd, struct.pack("!IQ", len(FORGED[what]), number) + FORGED[what])
            except OSError: pass
        time.sleep(1000)
    if what == "leaves temporary files":
        import tempfile
        with tempfile.NamedTemporaryFile(delete=False, prefix="left-behind-") as file: file.write(b"x")
        return 1.0
    if what == "huge message": raise ValueError("x" * (64 << 20))
    if what == "keyboard interrupt": raise KeyboardInterrupt
    if what == "deep recursion":
        def down(): down()
        down()
    returned = {"unpicklable": Unpicklable(), "nan": float("nan"), "inf": -float("inf"), "huge integer": 10**400,
                "endless dict": {str(n): 1.0 for n in range(10**5)}, "long names": {"n" * 10**7: 1.0},
                "huge text": "y" * (64 << 20)}
    return returned.get(what, 0.5)
"""
FAILURES = {
    "infinite loop": "timed out after 5 s",
    "ignores signals": "timed out after 5 s",
    "many processes": "more than reward.max_processes=24",
    "memory bomb": "more than reward.max_memory_gib=0.25",
    "os._exit": "ended with exit code 7",
    "kills itself": "was killed by SIGKILL",
    "kills its group": "was killed by SIGKILL",
    "crashes the interpreter": "was killed by SIGSEGV",
    "leaves a daemon": "ended with exit code 0",
    "leaves a daemon and hangs": "timed out after 5 s",
    "writes into the socket": "2 times in a row",
    "empty reply": "sent what is no reply and was killed by SIGKILL, 2 times in a row",
    "reply of no object": "sent what is no reply",
    "reply with nan": "sent what is no reply",
    "reply with infinity": "sent what is no reply",
    "reply without parts": "sent what is no reply",
    "huge message": "ValueError: xxx",
    "keyboard interrupt": "2 times in a row",
    "deep recursion": "RecursionError: maximum recursion depth exceeded",
    "unpicklable": "RuntimeError: not even a repr",
    "nan": "returned nan; expected a finite number",
    "inf": "returned -inf; expected a finite number",
    "huge integer": "OverflowError",
    "endless dict": "a dict with 100000 entries",
    "huge text": "of type str; expected a number",
}
HARMLESS = {"1 GB of output": 1.0, "leaves temporary files": 1.0, "long names": 1.0}


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardConfig]:
    """The hostile reward; what its processes leave in the folder for temporary files is seen there."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "penstock_test_hostile.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield RewardConfig(
            fn="penstock_test_hostile:hostile", timeout_s=5.0, max_memory_gib=0.25, max_processes=24, max_attempts=2
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runner(rewards: RewardConfig) -> AsyncIterator[RewardRunner]:
    """One worker for all cases: it has to survive them."""
    made = RewardRunner(rewards)
    yield made
    await made.shutdown()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", [*FAILURES, *HARMLESS])
async def test_a_hostile_reward_costs_its_own_trajectory_at_most(what: str, runner: RewardRunner, trap: Trap) -> None:
    fine, result, after = await runner.score_many([pair("fine"), pair(what, nap=trap.nap_s), pair("fine")])
    assert fine == after == Score(0.5, {})
    if what in HARMLESS:
        assert isinstance(result, Score)
        assert result.reward == HARMLESS[what]
    else:
        assert isinstance(result, TrajectoryError)
        assert result.kind == "reward"
        assert FAILURES[what] in result.detail
        assert len(result.detail) < 5000
        assert len(result.summary) <= 510
    assert not await survives(trap)
    assert len(descendants(os.getpid())) < 10


async def test_temporary_files_of_a_reward_go_with_its_process(rewards: RewardConfig) -> None:
    folder = Path(tempfile.gettempdir())
    before = set(folder.iterdir())
    runner = RewardRunner(rewards)
    await runner.score_many([pair("leaves temporary files"), pair("kills itself"), pair("leaves temporary files")])
    assert len(list(folder.rglob("left-behind-*"))) >= 1
    await runner.shutdown()
    assert set(folder.iterdir()) == before


def test_a_worker_that_is_killed_takes_its_processes_and_files_with_it(
    rewards: RewardConfig, trap: Trap, tmp_path: Path
) -> None:
    """The worker gets no chance to clean up: its keeper does."""
    program = WORKER.format(config=rewards.model_dump_json(), nap=trap.nap_s)
    paths = os.pathsep.join([str(Path(tempfile.gettempdir())), str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        wait_until(lambda: _naps(trap, worker.pid))
        assert list(tmp_path.iterdir()) != []
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: list(tmp_path.iterdir()) == [])
    assert not asyncio.run(survives(trap))


async def test_a_reward_that_ends_again_and_again_costs_as_many_processes_as_it_may(rewards: RewardConfig) -> None:
    once = RewardRunner(rewards.model_copy(update={"max_attempts": 1}))
    thrice = RewardRunner(rewards.model_copy(update={"max_attempts": 3}))
    results = await asyncio.gather(*(runner.score_many([pair("os._exit")]) for runner in (once, thrice)))
    details = [result.detail for (result,) in results if isinstance(result, TrajectoryError)]
    assert details[0].endswith("its process ended with exit code 7")
    assert details[1].endswith("its process ended with exit code 7, 3 times in a row")
    for runner in (once, thrice):
        await runner.shutdown()


async def test_a_worker_that_is_shut_down_leaves_no_process(rewards: RewardConfig, trap: Trap) -> None:
    runner = RewardRunner(rewards)
    await runner.start()
    scoring = asyncio.create_task(runner.score_many([pair("leaves a daemon and hangs", nap=trap.nap_s)]))
    await asyncio.to_thread(wait_until, lambda: _naps(trap, os.getpid()))
    await runner.shutdown()
    await scoring
    assert not await survives(trap)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _naps(trap: Trap, ancestor: int) -> bool:
    """Does a descendant sleep as the hostile reward tells its daemon to?"""
    for pid in descendants(ancestor):
        with contextlib.suppress(OSError):
            if trap.nap_s.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return True
    return False


WORKER = """
import asyncio
from test_hostile import pair
from penstock.envs.config import RewardConfig
from penstock.envs.scoring import RewardRunner

async def main():
    config = RewardConfig.model_validate_json({config!r}).model_copy(update={{"timeout_s": 60.0}})
    await RewardRunner(config).score_many([pair("leaves a daemon and hangs", nap={nap!r})])

asyncio.run(main())
"""
