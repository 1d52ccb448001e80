"""`penstock rm` and `penstock dpo` before anything starts: their requirements and their processes."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.tasks.arithmetic import ArithmeticTasks
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config
from penstock.platform.checks.tasks import check_plugins
from penstock.platform.cluster.placement import plan_placement
from penstock.platform.metrics.console import RunConsole
from penstock.platform.run.offline_training import ExampleLimit, encode_examples, encode_pairs
from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.chat_tokenizers import chat_tokenizer

EXPERIMENT = ["experiment=arithmetic_preference"]
SMALL = ["preference.eval_pairs=16"]


def errors(*overrides: str, command: str = "rm") -> list[str]:
    try:
        config = compose_config([*EXPERIMENT, *overrides])
    except ConfigError as problem:
        return problem.violations
    return [finding.message for finding in check_config(config, command) if finding.severity == "error"]


def test_a_reward_model_is_trained_whole_and_dpo_may_train_adapters():
    assert "must be trained whole" in "".join(errors("trainer=lora"))
    assert errors("trainer=lora", command="dpo") == errors(command="dpo")


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_the_experiment_is_sound_and_starts_a_trainer_only(command) -> None:
    assert errors(command=command) == []
    placements = plan_placement(compose_config(EXPERIMENT), command)
    assert [(one.role, one.index) for one in placements] == [("driver", 0), ("trainer", 0)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preference=null"], "preference is not set"),
        (["trainer.max_tokens_per_micro_batch=200"], "below 2 x model.max_context_tokens=128"),
        (["trainer.num_ranks=2", "trainer.tensor_parallel_size=2"], "one rank needs the whole pair"),
        (["model.path=null"], "model.path is not set"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(overrides, words) -> None:
    assert any(words in message for message in errors(*overrides))


class Codec:
    """Characters are tokens."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def end_after(self, _prompt: str) -> int:
        return 1


def test_pairs_are_encoded_with_their_end_tokens() -> None:
    source = ArithmeticTasks(seed=0)
    (pair,) = encode_pairs(source, Codec(), source.held_out(1), ExampleLimit(128, "error"))
    (task,) = source.held_out(1)
    assert pair.prompt == tuple(map(ord, task.prompt))
    assert pair.chosen == (*map(ord, source.gold_response(task)), 1)
    assert pair.rejected[-1] == 1
    assert pair.rejected != pair.chosen


def test_given_answers_to_messages_end_with_the_token_of_the_chat_template() -> None:
    """As with Llama 3, whose generation config names two smaller ids too."""
    codec = TokenCodec(chat_tokenizer("llama"), generation_eos_ids=(1, 2))
    end = codec.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    task = Task(TaskId("rows/7"), [{"role": "user", "content": "?"}], {"chosen": "25", "rejected": "26"})
    source, limit = SimpleNamespace(gold_response=lambda _task: "25"), ExampleLimit(128, "error")
    (pair,) = encode_pairs(source, codec, [task], limit)
    ((_, response),) = encode_examples(source, codec, [task], limit)
    assert (pair.chosen[-1], pair.rejected[-1], response[-1]) == (end, end, end)


def test_a_pair_that_does_not_fit_the_context_is_named_with_both_numbers() -> None:
    task = Task(TaskId("rows/7"), "12+13=", {"chosen": "25", "rejected": "2" * 30})
    with pytest.raises(ConfigError, match="rows/7 have 37 tokens, above"):
        list(encode_pairs(ArithmeticTasks(seed=0), Codec(), [task], ExampleLimit(36, "error")))
    limit, printed = ExampleLimit(36, "skip"), StringIO()
    assert list(encode_pairs(ArithmeticTasks(seed=0), Codec(), [task, task], limit)) == []
    limit.tell_skipped(RunConsole(1, stream=printed))
    assert "more than 36 tokens: 1\n" in printed.getvalue(), "of two epochs"


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": str(number)} for number in range(999)]


def rows_that_prefer_nothing() -> list[dict[str, str]]:
    return [row | {"rejected": row["chosen"]} for row in rows()]


@pytest.mark.parametrize(
    ("function", "words"),
    [("rows", ""), ("rows_that_prefer_nothing", "nothing is preferred"), ("rows_without_rejected", "rejected=None")],
)
def test_rows_of_a_dataset_are_pairs(function: str, words: str) -> None:
    config = compose_config([*EXPERIMENT, "env=dataset", f"env.args.rows={__name__}:{function}", *SMALL])
    found = [finding.message for finding in check_plugins(config, "rm") if finding.severity == "error"]
    assert found == [] if not words else words in "".join(found)


def rows_without_rejected() -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "chosen": row["chosen"]} for row in rows()]
