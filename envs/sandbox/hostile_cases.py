"""Programs that try to do harm. One that gets what it must not get prints `LEAK`.

`$FILE`, `$FOLDER`, `$PORT`, `$NAP` and `$HOST_PID` stand for what a trap (hostile.py) laid out on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from penstock.envs.sandbox.contract import Outcome

LEAK = "LEAK"


@dataclass(frozen=True, slots=True)
class HostileCase:
    """One program.

    Attributes:
        name: What it does.
        code: Python source.
        expected: Outcomes that are fine.
        needs_isolation: Without isolation it would hurt the machine, so it is not run.
    """

    name: str
    code: str
    expected: tuple[Outcome, ...]
    needs_isolation: bool = False


def _case(name: str, code: str, *expected: Outcome) -> HostileCase:
    return HostileCase(name, dedent(code), expected or ("exited",))


def _only_isolated(name: str, code: str, *expected: Outcome) -> HostileCase:
    return HostileCase(name, dedent(code), expected or ("exited",), needs_isolation=True)


HOSTILE_CASES: tuple[HostileCase, ...] = (
    _case("infinite loop", "while True: pass", "wall_clock", "cpu_time"),
    _case("endless sleep", "import time; time.sleep(1000)", "wall_clock"),
    _case(
        "many processes",
        """
        import os, time
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)
        """,
        "processes",
        "exited",
        "wall_clock",
    ),
    _only_isolated(
        "fork bomb",
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        "processes",
        "wall_clock",
        "cpu_time",
    ),
    _case(
        "threads without end",
        """
        import threading, time
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(1000,)).start()
        """,
        "processes",
        "exited",
        "wall_clock",
    ),
    _case(
        "memory bomb",
        """
        import time
        hoard = []
        while True:
            hoard.append(b"x" * (16 << 20))
            time.sleep(0.01)
        """,
        "memory",
        "exited",
    ),
    _case(
        "memory bomb in many processes",
        """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                hoard = b"x" * (60 << 20)
                time.sleep(1000)
        time.sleep(1000)
        """,
        "memory",
    ),
    _case(
        "hides memory in files without a name",
        """
        import os
        held = []
        try:
            while len(held) < 20:
                held.append(os.memfd_create("hoard"))
                os.write(held[-1], bytes(8 << 20))
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case(
        "hides memory in detached segments",
        """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.shmat.restype = ctypes.c_void_p
        held = []
        while len(held) < 4 and (segment := libc.shmget(0, ctypes.c_size_t(40 << 20), 0o1600)) >= 0:
            held.append(segment)
            address = ctypes.c_void_p(libc.shmat(segment, None, 0))
            ctypes.memset(address, 1, 40 << 20)
            libc.shmdt(address)
        for segment in held:
            libc.shmctl(segment, 0, None)
        if len(held) == 4:
            print("LEAK")
        """,
    ),
    _case(
        "fills the disk",
        """
        written = 0
        try:
            for number in range(16):
                with open(f"f{number}", "wb") as file:
                    written += file.write(bytes(4 << 20))
        except OSError:
            pass
        if written > 20 << 20:
            print("LEAK", written)
        """,
    ),
    _case(
        "one huge file",
        """
        try:
            with open("f", "wb") as file:
                for _ in range(16):
                    file.write(bytes(1 << 20))
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case("1 GB of output", "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))", "output"),
    _case("os._exit", "import os; os._exit(7)"),
    _case("kills itself", "import os; os.kill(os.getpid(), 9)", "killed"),
    _case("crashes the interpreter", "import ctypes; ctypes.string_at(0)", "killed"),
    _only_isolated("kills everyone", "import os; os.kill(-1, 9)"),
    _only_isolated("kills its supervisor", "import os; os.kill(os.getppid(), 9)"),
    _case(
        "signals the sandbox's user",
        """
        import os
        try:
            os.kill($HOST_PID, 0)
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case(
        "leaves a daemon",
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "$NAP"])
            os._exit(0)
        time.sleep(0.3)  # until it is a program of its own
        """,
    ),
    _case(
        "reads the host's environment",
        """
        import glob, os
        found = [name for name in os.environ if name.startswith("PENSTOCK_")]
        for path in glob.glob("/proc/*/environ"):
            try:
                found += [path] if b"PENSTOCK_" in open(path, "rb").read() else []
            except OSError:
                pass
        if found:
            print("LEAK", found)
        """,
    ),
    _case(
        "reads the host's files",
        """
        try:
            print("LEAK", open("$FILE").read())
        except OSError:
            pass
        """,
    ),
    _case(
        "writes outside",
        """
        from pathlib import Path
        for folder in ("$FOLDER", "/usr", "/etc", "/dev", "/proc/sys/kernel", "/"):
            path = Path(folder) / "penstock-was-here"
            try:
                path.write_text("x")
                print("LEAK", folder)
                path.unlink()
            except OSError:
                pass
        """,
    ),
    _case(
        "opens a socket to the host",
        """
        import socket
        try:
            socket.create_connection(("127.0.0.1", $PORT), timeout=0.5)
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case(
        "opens a socket to the outside",
        """
        import socket
        try:
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53))
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case(
        "looks into its supervisor",
        """
        import os
        try:
            open(f"/proc/{os.getppid()}/mem", "r+b")
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    _case(
        "makes a user namespace",
        """
        import ctypes
        if ctypes.CDLL(None).unshare(0x10000000) == 0:
            print("LEAK")
        """,
    ),
    _only_isolated(
        "mounts a file system",
        """
        import ctypes
        if ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, b"size=4k") == 0:
            print("LEAK")
        """,
    ),
    _case("an exception with a huge message", "raise ValueError('x' * (8 << 20))", "exited", "output"),
)
