"""Another interpreter for `env.python`: an environment of Python's `venv` with what our part needs, and one module."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NEEDED = ("numpy", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection")
MODULE = "only_there"
"""Imported there only."""
SOURCE = '''
import os
import signal
import sys

from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks


class Echo(GeneratedTasks):
    """Names a digit; `act` is what one of its parts does."""

    def __init__(self, seed, act=""):
        if act == "refuses":
            raise ValueError("no such act")
        super().__init__(seed)
        self.act = act

    def draw(self, rng):
        word = str(rng.randint(0, 9))
        row = {"prompt": f"{rng.randint(1000, 9999)}=", "word": word, "prefix": sys.prefix, "pid": os.getpid()}
        if self.act == "no JSON":
            row["word"] = {1j}
        return row

    def split_by(self, row):
        return {"prompt": row["prompt"]}

    def environment(self):
        return Episode(self.act)

    def gold_actions(self, task):
        if self.act == "raises":
            raise KeyError("gold")
        return [task.fields["word"]]


class Episode(Environment):
    def __init__(self, act):
        self.act = act

    def step(self, action):
        if self.act == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return Done(score(action.text, self.task.fields["word"]))


def score(text, word):
    right, is_there = float(text == word), float(sys.modules[__name__].__file__.startswith(sys.prefix))
    return {"reward": right, "is_there": is_there}
'''


def make_interpreter(folder: Path, *, has_needed: bool = True) -> str:
    """Make one in `folder`, and return its path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in NEEDED if has_needed else ():
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        for path in (found, found.with_name(f"{found.name}.libs")):
            if path.exists():
                (packages / path.name).symlink_to(path)
    (packages / f"{MODULE}.py").write_text(SOURCE)
    return str(folder / "bin" / "python")
