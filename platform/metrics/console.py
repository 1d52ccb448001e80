"""Console output of a run: a header, one line per training step, and a summary at the end."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from penstock.platform.metrics.progress import Progress, ProgressLine, format_count, format_duration
from penstock.platform.metrics.summary import RunSummary
from penstock.platform.metrics.trackers.config import ConsoleForm

_RATE_WINDOW = 20
_REPEAT_HEADING_LINES = 40
_ACCURACY, _MEAN = "share", "mean"

# Heading, unit below it, width in characters: 80 in all with two spaces between, up to 999 steps.
_COLUMNS = (
    ("step", "", 7),
    ("version", "", 7),
    ("reward", "mean", 6),
    ("eval", _ACCURACY, 5),
    ("staleness", "mean/max", 9),
    ("sampled", "tok/s", 7),
    ("trained", "tok/s", 7),
    ("idle", "train/eng", 9),
    ("left", "", 7),
)
_LEFT_OUT_FIRST = ("trained", "sampled", "version", "idle", "staleness", "left")
"""Columns that a narrow terminal has no space for, the first one first."""


class RunConsole:
    """Human-readable progress on one stream, without control codes if the stream is not a terminal.

    A terminal of less than 80 columns shows fewer columns, so that no line wraps; a stream that is no terminal has all.
    A line is printed for each record that holds `reward/mean`, at most one per step. Evaluations during training
    appear in the line of the next step: the accuracy, or the mean reward while no answer has solved its task.
    """

    def __init__(
        self,
        total_steps: int,
        form: ConsoleForm = "table",
        *,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the console.

        Args:
            total_steps: Steps the run will do.
            form: `table`; `quiet`, only `final`; or `json`, an object per line with its `event`.
            stream: Where to print; standard output by default.
            clock: Seconds, for the time left.
        """
        self._total_steps = total_steps
        self._form = form
        self._console = Console(file=stream, highlight=False, emoji=False, markup=False)
        self._console.on_broken_pipe = lambda: None  # type: ignore[method-assign]  # rich would end the process
        self._line = ProgressLine(self._console)
        self._clock = clock
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._last_step = 0
        self._num_lines = 0
        self._eval: float | None = None
        self._eval_unit = self._headed_unit = _ACCURACY
        self._is_solved = False

    def header(self, name: str, facts: Mapping[str, str]) -> None:
        """Print the name of the run and some facts about it, one per line.

        Args:
            name: Name of the run.
            facts: Label -> text, e.g. `model -> Qwen3, 0.8 M parameters`.
        """
        if self._form == "json":
            self._emit("start", {"name": name, **facts})
            return
        width = max((len(label) for label in facts), default=0)
        self._print()
        self._print(Text.assemble(("penstock", "bold cyan"), (" · ", "dim"), (name, "bold")))
        for label, fact in facts.items():
            self._print(Text.assemble((f"  {label:<{width}}  ", "dim"), fact))
        self._print()

    def note(self, message: str) -> None:
        """Print one line apart from the table, e.g. an evaluation or the start of the engines."""
        if self._form == "json":
            self._emit("note", {"text": message})
        self._print(Text(f"  {message}", style="dim"))

    @contextmanager
    def showing(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Within it, say what the command does while nothing else is printed. `progress` is called in a thread."""
        if self._form != "table":
            yield
            return
        with self._line.showing(progress):
            yield

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record of the hub; print the step's line if it is a training step's."""
        if self._form == "json":
            finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
            self._emit("metrics", {"step": step, "metrics": finite})
            return
        if (accuracy := metrics.get("eval/accuracy")) is not None:
            reward_mean = metrics.get("eval/reward_mean")
            self._is_solved = self._is_solved or accuracy > 0
            # Graded rewards of which none passes are shown by their mean.
            is_graded = reward_mean and not self._is_solved
            self._eval, self._eval_unit = (reward_mean, _MEAN) if is_graded else (accuracy, _ACCURACY)
        self._total_steps = int(metrics.get("config/total_steps", self._total_steps))
        if "reward/mean" not in metrics or step == self._last_step:
            return
        self._last_step = step
        self._arrivals.append((self._clock(), step))
        is_repeat_due = self._console.is_terminal and self._num_lines % _REPEAT_HEADING_LINES == 0
        columns = self._columns()
        if self._num_lines == 0 or is_repeat_due or self._eval_unit != self._headed_unit:
            self._headed_unit = self._eval_unit
            self._print(Text("  ".join(name.rjust(width) for name, _, width in columns), style="bold"))
            self._print(Text("  ".join(unit.rjust(width) for _, unit, width in columns).rstrip(), style="dim"))
        self._num_lines += 1
        (first_s, first_step), (last_s, last_step) = self._arrivals[0], self._arrivals[-1]
        left = "–"
        if last_step > first_step:
            left = format_duration((last_s - first_s) / (last_step - first_step) * (self._total_steps - step))
        get, version = metrics.get, metrics.get("trainer/version")
        cells = (
            (f"{step}/{self._total_steps}", "bold"),
            (f"{version:.0f}" if version is not None else "–", ""),
            (_number(get("reward/mean")), "green"),
            (_number(self._eval), "bold green"),
            (_pair(get("staleness/mean_versions"), "{:.2f}", get("staleness/max_versions"), "{:.0f}"), "cyan"),
            (_count(get("throughput/generated_tokens_per_s")), ""),
            (_count(get("throughput/trained_tokens_per_s")), ""),
            (_pair(get("idle/trainer_share"), "{:.0%}", get("idle/engine_share"), "{:.0%}"), "magenta"),
            (left, "dim"),
        )
        padded = [
            (cell.rjust(width), style)
            for (cell, style), (name, _, width) in zip(cells, _COLUMNS, strict=True)
            if name in {shown for shown, _, _ in columns}
        ]
        self._print(Text("  ").join([Text(cell, style=style) for cell, style in padded]))

    def _columns(self) -> list[tuple[str, str, int]]:
        """The columns that fit the terminal."""
        shown = [(name, self._eval_unit if name == "eval" else unit, width) for name, unit, width in _COLUMNS]
        for name in _LEFT_OUT_FIRST:
            is_too_wide = sum(width + 2 for _, _, width in shown) - 2 > self._console.width
            if self._console.is_terminal and is_too_wide:
                shown = [column for column in shown if column[0] != name]
        return shown

    def final(self, summary: RunSummary, run_dir: Path, next_command: str | None = None) -> None:
        """Print how the run ended and where its files are.

        Args:
            summary: Of the run.
            run_dir: Its directory.
            next_command: What goes on with it, the last line; None if it has completed.
        """
        if self._form == "json":
            self._emit("summary", {**summary.to_dict(), "run_dir": str(run_dir), "next_command": next_command})
            return
        self._form = "table"
        ledger = summary.ledger
        style = "bold green" if summary.status == "completed" else "bold yellow"
        self._print()
        self._print(
            Text.assemble(
                (summary.status, style),
                f" by {summary.ended_by}" if summary.ended_by else "",
                f" · {summary.steps} steps in {format_duration(summary.wall_s)}"
                f" · peak memory {summary.peak_memory_gib:.1f} GiB",
            )
        )
        prompts = summary.skipped_prompts
        on = f" on {prompts.evaluated} of {prompts.evaluated + prompts.held_out} tasks" if prompts.held_out else ""
        rewards = f"{_number(summary.eval_reward_before)} → {_number(summary.eval_reward_after)}"
        tasks = "" if summary.evaluated_on == "held-out" else f" on {summary.evaluated_on} tasks"
        if summary.evaluated_on is None:
            self._fact("eval", "none: the run has no evaluations (evaluation.num_tasks=0)")
        elif summary.is_graded:
            self._fact(
                "eval", f"mean reward {rewards}{tasks}{on}  (none solved: all below dataflow.pass_reward)", "bold"
            )
        else:
            shares = f"{_share(summary.eval_before)} → {_share(summary.eval_after)}"
            self._fact("eval", f"accuracy {shares}, mean reward {rewards}{tasks}{on}", "bold")
        self._fact(
            "reward",
            f"{_number(summary.reward_first)} → {_number(summary.reward_last)}  (sampled answers, first → last steps)",
        )
        self._fact(
            "staleness",
            f"max {summary.max_staleness_seen} of {summary.max_staleness_configured} allowed"
            f" · {summary.share_tokens_stale:.0%} of trained tokens stale"
            f" · {summary.multi_version_trajectories} trajectories hold several versions",
        )
        self._fact(
            "ledger",
            f"admitted {ledger.admitted} = trained {ledger.trained} + dropped {ledger.dropped}"
            f" + filtered {ledger.filtered} + failed {ledger.failed} + live {ledger.live}",
        )
        if skipped := str(prompts):
            self._fact("skipped", f"{skipped}: the prompt leaves no space for an answer", "yellow")
        if not ledger.is_balanced:
            self._fact("", "the ledger does not balance: this is a bug in Penstock", "bold red")
        for reason, count in sorted(summary.failed_attempts.items(), key=lambda item: -item[1]):
            self._fact("failed", f"{count} attempts, {reason}", "yellow")
        for sentence in summary.slow_parts.values():
            self._fact("slow", sentence, "yellow")
        self._fact("tokens", f"{summary.tokens_generated:,} generated, {summary.tokens_trained:,} trained")
        if summary.policy_version is not None:
            self._fact("policy", f"{run_dir / 'policy'}  (v{summary.policy_version})")
        self._fact("summary", str(run_dir / "summary.json"))
        if (run_dir / "report.html").exists():
            self._fact("report", str(run_dir / "report.html"), "bold cyan")
        self._print()
        if next_command is not None:
            self._print(next_command)

    def _fact(self, label: str, text: str, style: str = "") -> None:
        self._print(Text.assemble((f"  {label:<10}", "dim"), (text, style)))

    def _emit(self, event: str, content: Mapping[str, Any]) -> None:
        with self._line.printing():
            self._console.file.write(json.dumps({"event": event, **content}) + "\n")
            self._console.file.flush()

    def _print(self, text: Text | str = "") -> None:
        if self._form == "table":
            with self._line.printing():
                self._console.print(text, soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _count(value: float | None) -> str:
    return "–" if value is None else format_count(value)


def _pair(first: float | None, first_format: str, second: float | None, second_format: str) -> str:
    left = "–" if first is None else first_format.format(first)
    right = "–" if second is None else second_format.format(second)
    return f"{left}/{right}"
