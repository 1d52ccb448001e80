"""Penstock: asynchronous reinforcement-learning post-training of language models on Ray."""

import sys

__version__ = "0.1.0"

MOVED = {
    "penstock.envs.agents": "penstock.envs.tasks.agents",
    "penstock.envs.arithmetic": "penstock.envs.tasks.arithmetic",
    "penstock.envs.arithmetic_form": "penstock.envs.rewards.arithmetic_form",
    "penstock.envs.generated_tasks": "penstock.envs.tasks.generated_tasks",
    "penstock.envs.math_tasks": "penstock.envs.tasks.math_tasks",
    "penstock.envs.mcp_tools": "penstock.envs.tools.mcp_tools",
    "penstock.envs.preferences": "penstock.envs.tasks.preferences",
    "penstock.envs.python_tasks": "penstock.envs.tasks.python_tasks",
    "penstock.envs.tool_environment": "penstock.envs.tools.tool_environment",
}
"""Public modules by the names they had before, and where they are now."""


class _Moved:
    """Asked when nothing else has found a module: an old name is answered with the new one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004 - Python's signature
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} has moved: import {MOVED[name]}", name=name)


sys.meta_path.append(_Moved)
