"""Descendants are killed to the last one, whatever they do meanwhile."""

from __future__ import annotations

import signal

import pytest

from penstock.envs.workers import process_tree


@pytest.mark.parametrize("completes_after", [signal.SIGSTOP, signal.SIGKILL])
def test_a_fork_that_is_under_way_when_its_process_is_stopped_is_killed_too(
    completes_after: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel completes such a fork at any time until the process is killed: here right after a signal to 1."""
    alive, received = [1], dict[int, list[int]]()

    def send(pid: int, signum: int) -> None:
        received.setdefault(pid, []).append(signum)
        if (pid, signum) == (1, completes_after):
            alive.append(2)

    monkeypatch.setattr(process_tree, "descendants", lambda _pid: list(alive))
    monkeypatch.setattr(process_tree, "_send", send)
    process_tree.kill_descendants(0)
    assert received == {1: [signal.SIGSTOP, signal.SIGKILL], 2: [signal.SIGSTOP, signal.SIGKILL]}
