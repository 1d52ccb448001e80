"""Observations are rendered once, from the end of the answer before them; templates that cannot do that are named."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.versions import Span
from penstock.envs.environment import Observation
from penstock.envs.tools.functions import Toolbox, hermes_text
from penstock.envs.tools.tool_environment import ToolEnvironment
from penstock.envs.workers.episode_child import is_episode_reply, to_episode_reply
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.tokenization.turn_template import TurnTemplate
from penstock.rollout.trajectory.conversation import EpisodeBudget
from penstock.rollout.trajectory.threads import Threads
from tests.chat_tokenizers import chat_tokenizer, family_tokenizer

QUESTION: Any = {"role": "user", "content": "?"}
TOOL = [{"role": "tool", "content": "4"}]


def with_template(template: str) -> TokenCodec:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.chat_template = template
    return TokenCodec(tokenizer)


@pytest.mark.parametrize(
    ("template", "end", "expected"),
    [
        ("chatml", "<|im_end|>", "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"),
        ("chatml", "", "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"),
        ("chatml", "<|eot_id|>", "<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"),
        ("llama", "<|eot_id|>", "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"),
        ("llama", "", "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"),
    ],
)
def test_the_end_of_a_turn_occurs_exactly_once(template: str, end: str, expected: str) -> None:
    header = {"chatml": "<|im_start|>assistant\n", "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n"}
    assert TurnTemplate(chat_tokenizer(template)).between(TOOL, end) == expected + header[template]


def test_plain_observations_are_written_as_they_are() -> None:
    codec = TokenCodec(character_tokenizer())
    assert codec.decode(codec.encode_observation("<7", last_token=1)) == "<7"
    assert codec.encode_observation("", last_token=1) == ()


def test_a_template_without_a_generation_prompt_is_refused() -> None:
    codec = with_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    with pytest.raises(ConfigError, match=r"no generation prompt.*an answer begins after '<\|im_start\|>assistant"):
        codec.encode_prompt([{"role": "user", "content": "?"}])


def test_a_template_whose_generation_prompt_is_the_end_of_the_question_is_fine() -> None:
    codec = with_template(
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    )
    assert codec.decode(codec.encode_prompt([{"role": "user", "content": "?"}])) == "[INST] ? [/INST]"
    assert codec.turn_template.between(TOOL, "</s>") == "[INST] 4 [/INST]"


def test_a_template_that_drops_earlier_answers_cannot_place_an_observation() -> None:
    codec = with_template(
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match="renders an assistant message 0 times where another follows"):
        codec.encode_observation(TOOL, last_token=2)


def test_a_template_that_refuses_a_role_is_quoted() -> None:
    codec = with_template(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(
        TrajectoryError, match=r"refuses messages with roles \['user', 'assistant', 'tool'\].*no tools here"
    ) as caught:
        codec.encode_observation(TOOL, last_token=2)
    assert caught.value.kind == "env"


HERMES = chat_tokenizer("hermes").chat_template
SHOWN = '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>'
WITHOUT_OUR_CALLS = {
    "knows no tools": chat_tokenizer("chatml").chat_template,
    "asks for calls in another format": HERMES.replace(SHOWN, "<tool_call>\\n<function=name>\\n</tool_call>"),
    "asks for calls with other keys": HERMES.replace('"arguments": <object>', '"parameters": <object>'),
    "refuses tools": "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    + chat_tokenizer("chatml").chat_template,
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = Toolbox([add]).schemas()


def test_a_template_that_asks_for_calls_that_we_parse_declares_the_tools_itself() -> None:
    codec = with_template(HERMES)
    assert codec.decode(codec.encode_prompt([QUESTION], TOOLS)).startswith("system\nYou are helpful.\n\n# Tools\n")
    wanted = codec.tokenizer.apply_chat_template([QUESTION], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert codec.tokenizer.decode(codec.encode_prompt([QUESTION], TOOLS)) == wanted
    assert "# Tools" not in codec.decode(codec.encode_prompt([QUESTION]))
    assert codec.encode_observation(TOOL, codec.stop_token_ids[0]) == with_template(
        chat_tokenizer("chatml").chat_template
    ).encode_observation(TOOL, codec.stop_token_ids[0])


@pytest.mark.parametrize("name", WITHOUT_OUR_CALLS)
def test_a_policy_whose_template_does_not_is_told_of_the_tools_in_its_system_message(name: str) -> None:
    assert name == "knows no tools" or WITHOUT_OUR_CALLS[name] not in (HERMES, WITHOUT_OUR_CALLS["knows no tools"])
    codec = with_template(WITHOUT_OUR_CALLS[name])
    text = codec.decode(codec.encode_prompt([{"role": "system", "content": "Be brief."}, QUESTION], TOOLS))
    assert text.startswith("system\nBe brief.\n\nYou may call these functions:\n<tools>\n{")
    assert text.count('"name": "add"') == 1


class Sums(ToolEnvironment):
    tools = (add,)

    def score(self, task: Task, answer: str) -> float:
        return float(answer == "5")


def test_the_tools_of_an_environment_reach_the_template_through_its_process() -> None:
    task = Task(TaskId("t"), [QUESTION])
    reply = json.loads(json.dumps(to_episode_reply(Sums().reset(task), "reset")))
    assert is_episode_reply(reply)
    codec = with_template(HERMES)
    threads = Threads(task, codec, EpisodeBudget(max_turns=2, max_tokens=1000), SamplingParams(8))
    threads.receive(reply)
    assert threads.conversations["main"].token_ids == codec.encode_prompt([QUESTION], TOOLS)


@pytest.mark.parametrize("family", ["mistral", "harmony"])
def test_results_of_an_environment_reach_templates_that_refuse_them_without_their_call(family: str) -> None:
    task, codec = Task(TaskId("t"), [QUESTION]), TokenCodec(family_tokenizer(family))
    threads = Threads(task, codec, EpisodeBudget(max_turns=2, max_tokens=2000), SamplingParams(2000))
    threads.receive(to_episode_reply(Sums().reset(task), "reset"))
    ((_, turn),) = threads.pending_turns
    ids = (*codec.encode_rendered(hermes_text("", [("add", "{}")])), codec.stop_token_ids[0])
    turn.extend(TokenDelta(ids, (-0.5,) * len(ids), (Span(0, len(ids)),), "stop"))
    threads.take_actions()
    threads.receive(to_episode_reply(Observation(TOOL, role="tool"), "step"))
    said = threads.turns[0].observation
    assert ("call00000 4" if family == "mistral" else "functions.add to=assistant") in said


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BAD_PROMPTS: dict[str, Any] = {
    "nothing": None,
    "a number": 7,
    "no message": [],
    "texts": ["?"],
    "half a character": [{"role": "user", "content": "\ud800"}],
    "half a character in text": "\ud800",
    "what the template refuses": [QUESTION, QUESTION],
    "no content": [{"role": "user"}, QUESTION],
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompt_that_cannot_be_rendered_is_an_env_failure(name: str) -> None:
    with pytest.raises(TrajectoryError) as caught:
        with_template(ALTERNATING).encode_prompt(BAD_PROMPTS[name])
    assert caught.value.kind == "env"


@pytest.mark.parametrize("prompt", [None, 7, []])
def test_a_prompt_that_is_nothing_does_not_ask_for_a_chat_template(prompt: Any) -> None:
    with pytest.raises(TrajectoryError, match="expected text, or chat messages"):
        TokenCodec(character_tokenizer()).encode_prompt(prompt)


@pytest.mark.parametrize("messages", [[QUESTION, QUESTION], [{"role": "user", "content": "\ud800"}]])
def test_an_observation_that_cannot_be_placed_is_an_env_failure(messages: Any) -> None:
    codec = with_template(ALTERNATING)
    assert codec.encode_observation([QUESTION], last_token=2)
    with pytest.raises(TrajectoryError) as caught:
        codec.encode_observation(messages, last_token=2)
    assert caught.value.kind == "env"


def test_no_observation_is_taken_for_the_answer() -> None:
    codec = TokenCodec(chat_tokenizer("chatml"))
    said = codec.decode(codec.encode_observation([{"role": "tool", "content": "PENSTOCK-ANSWER"}], last_token=2))
    assert said.count("PENSTOCK-ANSWER") == 1
