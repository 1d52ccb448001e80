"""Rows whose prompt leaves no space for an answer are left out of training and evaluation, and named in the scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import load_config
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_metric, read_summary
from tests.in_process import in_process, train_in_process
from tests.small_run import small_run_overrides

CONTEXT, NEW_TOKENS = 64, 8
LONG = "1+" * 60 + "1="


def overrides(folder: Path, *more: str, rows: int = 12, long_rows: tuple[int, ...] = (3, 7)) -> list[str]:
    """Rows of which some are too long, and four held-out rows of which the last is."""
    lines = [{"prompt": LONG if n in long_rows else f"{n}+1=", "answer": n + 1} for n in range(rows)]
    own = [{"prompt": prompt, "answer": 2} for prompt in ("0+2=", "2+0=", "1+1=", f"0+{LONG}")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    typed = [
        *("env=dataset", "env.args.path=rows.jsonl", "env.args.held_out=own.jsonl", "reward=exact_match"),
        *("evaluation.num_tasks=4", "dataflow.batch_groups=6", "total_steps=4"),
        *(f"model.max_context_tokens={CONTEXT}", f"rollout.sampling.max_new_tokens={NEW_TOKENS}"),
    ]
    return small_run_overrides(folder, "long", character_tokenizer(), *typed, *more)


def test_long_rows_are_never_admitted_and_named_in_every_score(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_in_process(tmp_path, overrides(tmp_path))
    run_dir, output = tmp_path / "runs" / "long", "".join(capfd.readouterr())
    summary = read_summary(run_dir)
    skipped, ledger = summary["skipped_prompts"], summary["ledger"]
    assert (ledger["trained"], ledger["failed"], summary["failed_attempts"]) == (24, 0, {})
    assert skipped["first"] in ("rows/3", "rows/7")
    # Of each epoch of 12 rows, 10 are admitted.
    assert skipped["taken"] - skipped["skipped"] == ledger["admitted"]
    assert skipped["skipped"] >= 4
    assert (skipped["evaluated"], skipped["held_out"]) == (3, 1)
    assert read_metric(run_dir, "flow/skipped_prompts")[-1] <= skipped["skipped"]
    assert read_metric(run_dir, "eval/skipped") == [1, 1]
    assert read_metric(run_dir, "eval/tasks") == [3, 3]
    assert output.count("on 3 of 4 (prompts too long: 1) held-out tasks") == 2
    assert f"{skipped['skipped']} of {skipped['taken']} training tasks" in output
    assert "on 3 of 4 tasks" in (run_dir / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "long_rows", "found"),
    [
        ((), (3, 7), ""),
        (
            ("env.on_long_prompt=error",),
            (3, 7),
            r"=error: 2 of the first 11 training tasks \(18\.2%\) are too long: the",
        ),
        (
            (),
            tuple(range(8)),
            r"8 of the first 12 training tasks \(66\.7%\) are too long, which is more than half: the",
        ),
    ],
)
def test_the_start_says_how_many_rows_are_left_out_and_refuses_if_most_are(
    tmp_path: Path, more: tuple[str, ...], long_rows: tuple[int, ...], found: str
) -> None:
    typed = overrides(tmp_path, *more, long_rows=long_rows)
    with in_process(tmp_path):
        if found:
            with pytest.raises(ConfigError, match=found):
                load_config("train", typed)
            return
        warnings = load_config("train", typed).warnings
    (training,) = (one for one in warnings if "2 of the first 11 training tasks (18.2%)" in one)
    assert "are left out, rows/" in training
    assert "with rollout.sampling.max_new_tokens=8 that is 130, above model.max_context_tokens=64" in training
    (held_out,) = (one for one in warnings if "1 of the first 4 held-out tasks (25.0%)" in one)
    assert "held_out/3 first" in held_out
