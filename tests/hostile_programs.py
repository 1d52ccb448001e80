"""Hostile programs: those of `penstock sandbox check`, and others."""

from __future__ import annotations

import os

from penstock.envs.sandbox.hostile import HOSTILE_CASES, HostileCase

PROGRAMS = (
    *HOSTILE_CASES,
    HostileCase(
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
    HostileCase(
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
    HostileCase("1 GB of output", "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))", ("output",)),
    HostileCase("kills all processes", "import os; os.kill(-1, 9)", needs_isolation=True),
    HostileCase(
        "writes outside",
        """
        from pathlib import Path
        for folder in (Path("$FILE").parent, "/usr", "/etc", "/dev", "/proc/sys/kernel", "/"):
            path = Path(folder) / "penstock-was-here"
            try:
                path.write_text("x")
                print("LEAK", folder)
                path.unlink()
            except OSError:
                pass
        """,
    ),
    HostileCase(
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
    HostileCase("infinite loop", "while True: pass", ("wall_clock", "cpu_time")),
    HostileCase(
        "many processes",
        """
        import os, time
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)
        """,
        ("processes", "exited", "wall_clock"),
    ),
    HostileCase(
        "threads without end",
        """
        import threading, time
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(1000,)).start()
        """,
        ("processes", "exited", "wall_clock"),
    ),
    HostileCase(
        "memory bomb",
        """
        import time
        hoard = []
        while True:
            hoard.append(b"x" * (16 << 20))
            time.sleep(0.01)
        """,
        ("memory", "exited"),
    ),
    HostileCase(
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
    HostileCase(
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
    HostileCase("os._exit", "import os; os._exit(7)"),
    HostileCase("kills itself", "import os; os.kill(os.getpid(), 9)", ("killed",)),
    HostileCase("crashes the interpreter", "import ctypes; ctypes.string_at(0)", ("killed",)),
    HostileCase("kills its supervisor", "import os; os.kill(os.getppid(), 9)", needs_isolation=True),
    HostileCase(
        "signals the sandbox's user",
        f"""
        import os
        try:
            os.kill({os.getpid()}, 0)
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    HostileCase(
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
    HostileCase(
        "mounts a file system",
        """
        import ctypes
        if ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, b"size=4k") == 0:
            print("LEAK")
        """,
        needs_isolation=True,
    ),
    HostileCase("an exception with a huge message", "raise ValueError('x' * (8 << 20))", ("exited", "output")),
)
