"""The console says what a command does while it prints nothing else, and a console that is gone ends nothing."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from penstock.platform.metrics.console import RunConsole
from penstock.platform.metrics.progress import Progress, ProgressLine


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def line_to(stream: io.StringIO, clock: Clock, *, is_terminal: bool) -> ProgressLine:
    return ProgressLine(Console(file=stream, force_terminal=is_terminal, width=60), clock)


def test_elsewhere_than_on_a_terminal_there_is_a_line_at_once_and_one_every_10_s_without_another() -> None:
    stream, clock = io.StringIO(), Clock()
    line = line_to(stream, clock, is_terminal=False)
    for _ in range(25):
        line.tick(Progress("starting Ray"))
        clock.now += 1.0
    assert stream.getvalue() == "  starting Ray · 0s\n  starting Ray · 10s\n  starting Ray · 20s\n"
    with line.printing():
        stream.write("a line of the run\n")
    clock.now += 9.0
    line.tick(Progress("starting Ray"))
    assert stream.getvalue().endswith("a line of the run\n"), "9 s after it"


def test_on_a_terminal_one_line_is_rewritten_and_erased_before_anything_else() -> None:
    stream, clock = io.StringIO(), Clock()
    line = line_to(stream, clock, is_terminal=True)
    line.tick(Progress("starting Ray"))
    clock.now += 1.0
    line.tick(Progress("starting Ray"))
    with line.printing():
        stream.write("a line of the run\n")
    assert stream.getvalue() == "  starting Ray · 0s\r\x1b[2K  starting Ray · 1s\r\x1b[2Ka line of the run\n"


def test_a_line_never_wraps_on_a_narrow_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    line = line_to(stream, clock, is_terminal=True)
    line.tick(Progress("評価" * 40))
    assert Console(width=200).measure(stream.getvalue()).maximum < 60


def test_an_evaluation_shows_answers_tokens_per_second_and_the_time_left() -> None:
    clock = Clock()
    line = line_to(io.StringIO(), clock, is_terminal=False)
    line.tick(Progress("evaluating v0", 0, 1024, "answers", 5_000))
    clock.now += 10.0
    text = line.text(Progress("evaluating v0", 256, 1024, "answers", 57_000), clock.now)
    assert text == "  evaluating v0 · ━━━━━─────────────── 256/1024 answers · 5.2k tok/s · 10s, 30s left"


def test_a_console_whose_reader_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    console = RunConsole(3, stream=stream)
    console.header("run", {"policy": "tiny"})
    console.note("still there")
    with console.showing(lambda: Progress("training")):
        pass
    console.observe(1, {"reward/mean": 0.5})
    with pytest.raises(BrokenPipeError):
        stream.write("x\n")
    stream.detach()


@pytest.mark.parametrize("form", ["quiet", "json"])
def test_forms_for_programs_have_no_progress_line(form: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as stream:
        with RunConsole(3, form, stream=stream).showing(lambda: Progress("training")):  # type: ignore[arg-type]
            pass
        assert not stream.tell()
