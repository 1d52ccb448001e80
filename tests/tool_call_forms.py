"""Turns with tool calls, written by hand in the form of each model family that a parser of vLLM reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Made = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_forecast",
            "description": "The weather of the next days.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Write something down.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "options": {"type": "object"}},
                "required": ["text"],
            },
        },
    },
]
OSLO: Made = ("get_forecast", {"city": "Oslo", "days": 3})
TOKYO: Made = ("get_forecast", {"city": "東京 und Zürich 🌦", "days": 12})
QUOTES: Made = ("note", {"text": "She said \"it's 5 o'clock\", then: a \\ and {braces}"})
NESTED: Made = ("note", {"text": "all", "options": {"deep": {"list": [1, "two", {"x": 3}], "empty": {}}}})


def dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def raw(value: Any) -> str:
    """A value between tags: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_calls(calls: Sequence[Made], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {dumped(arguments)}}}' for name, arguments in calls]


def in_tags(opening: str, closing: str, between: str = "\n") -> Callable[[Sequence[Made]], str]:
    return lambda calls: between.join(f"{opening}{call}{closing}" for call in json_calls(calls))


def as_list(opening: str, closing: str) -> Callable[[Sequence[Made]], str]:
    return lambda calls: f"{opening}[{', '.join(json_calls(calls))}]{closing}"


def functions_in(opening: str, closing: str) -> Callable[[Sequence[Made]], str]:
    def write(calls: Sequence[Made]) -> str:
        texts = []
        for name, arguments in calls:
            values = [f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items()]
            texts.append(f"{opening}\n<function={name}>\n{''.join(values)}</function>\n{closing}")
        return "\n".join(texts)

    return write


def in_python(calls: Sequence[Made]) -> list[str]:
    texts = []
    for name, arguments in calls:
        texts.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
    return texts


def deepseek_v3(calls: Sequence[Made]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Made]) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Sequence[Made]) -> str:
    text = "<｜DSML｜function_calls>\n"
    for name, arguments in calls:
        text += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            is_text = str(isinstance(value, str)).lower()
            text += f'<｜DSML｜parameter name="{key}" string="{is_text}">{raw(value)}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n"
    return text + "</｜DSML｜function_calls>"


def glm45(calls: Sequence[Made]) -> str:
    texts = []
    for name, arguments in calls:
        values = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in arguments.items()
        ]
        texts.append(f"<tool_call>{name}\n{''.join(values)}</tool_call>")
    return "\n".join(texts)


def kimi_k2(calls: Sequence[Made]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def minimax_m2(calls: Sequence[Made]) -> str:
    texts = []
    for name, arguments in calls:
        values = [f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in arguments.items()]
        texts.append(f'<invoke name="{name}">\n{"".join(values)}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def step3(calls: Sequence[Made]) -> str:
    texts = []
    for name, arguments in calls:
        values = [f'<steptml:parameter name="{k}">{raw(v)}</steptml:parameter>' for k, v in arguments.items()]
        invoked = f'<steptml:invoke name="{name}">{"".join(values)}</steptml:invoke>'
        texts.append(f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoked}<｜tool_call_end｜>")
    return "<｜tool_calls_begin｜>" + "\n".join(texts) + "<｜tool_calls_end｜>"


def functiongemma(calls: Sequence[Made]) -> str:
    texts = []
    for name, arguments in calls:
        values = ",".join(f"{key}:<escape>{raw(value)}<escape>" for key, value in arguments.items())
        texts.append(f"<start_function_call>call:{name}{{{values}}}<end_function_call>")
    return "".join(texts)


@dataclass(frozen=True)
class Family:
    """One form of calls.

    Attributes:
        parser: Its name in vLLM.
        write: Writes calls.
        tokens: The tokenizer that has its special tokens (tests/chat_tokenizers.py).
        broken: A turn whose call is malformed in the way of the form; nothing is read from it.
        unread: Cases that the parser of vLLM does not read, though the form allows them, or that the form does not
            allow: case -> why.
    """

    parser: str
    write: Callable[[Sequence[Made]], str]
    broken: str
    tokens: str = "plain"
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.parser if self.tokens in ("plain", self.parser) else f"{self.parser}-{self.tokens}"


BAD_JSON = '{"name": "get_forecast", "arguments": {"city": "Oslo", "days": }}'
ONE_CALL = ("two", "the form has one call in a turn")
NO_TEXT = (("text before", "the form has calls alone"), ("text after", "the form has calls alone"))
FAMILIES = [
    Family("hermes", in_tags("<tool_call>\n", "\n</tool_call>"), f"<tool_call>\n{BAD_JSON}\n</tool_call>", "hermes"),
    Family("qwen3_coder", functions_in("<tool_call>", "</tool_call>"), "<tool_call>\nno function\n</tool_call>"),
    Family("llama3_json", lambda calls: "; ".join(json_calls(calls, "parameters")), BAD_JSON, "llama3_json"),
    Family(
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls),
        '[TOOL_CALLS]get_forecast[ARGS]{"city": }',
        "mistral",
    ),
    Family("mistral", as_list("[TOOL_CALLS]", ""), f"[TOOL_CALLS][{BAD_JSON}]", "mistral_v3"),
    Family("deepseek_v3", deepseek_v3, "<｜tool▁calls▁begin｜>get_forecast<｜tool▁calls▁end｜>", "deepseek_v31"),
    Family(
        "deepseek_v31",
        deepseek_v31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{,}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31",
    ),
    Family("deepseek_v32", deepseek_v32, "<｜DSML｜function_calls>\nget_forecast\n</｜DSML｜function_calls>"),
    Family("glm45", glm45, "<tool_call></tool_call>", "glm45"),
    Family(
        "kimi_k2",
        kimi_k2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_forecast:0<|tool_call_argument_begin|>{,}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
    ),
    Family("granite", as_list("<|tool_call|>", ""), f"<|tool_call|>[{BAD_JSON}]", "granite"),
    Family("granite-20b-fc", in_tags("<function_call> ", ""), f"<function_call> {BAD_JSON}"),
    Family("granite4", in_tags("<tool_call>\n", "\n</tool_call>"), f"<tool_call>\n{BAD_JSON}\n</tool_call>"),
    Family("jamba", as_list("<tool_calls>", "</tool_calls>"), f"<tool_calls>[{BAD_JSON}]</tool_calls>", "jamba"),
    Family(
        "internlm",
        lambda calls: "".join(
            f"<|action_start|><|plugin|>{call}<|action_end|>" for call in json_calls(calls, "parameters")
        ),
        f"<|action_start|><|plugin|>{BAD_JSON}<|action_end|>",
        "internlm",
        (ONE_CALL,),
    ),
    Family(
        "phi4_mini_json",
        as_list("functools", ""),
        f"functools[{BAD_JSON}]",
        unread=(("nested", "vLLM 0.32 takes the first ] for the end of the calls"),),
    ),
    Family("pythonic", lambda calls: f"[{', '.join(in_python(calls))}]", "[get_forecast(city=)]", unread=NO_TEXT),
    Family(
        "llama4_pythonic",
        lambda calls: f"<|python_start|>[{', '.join(in_python(calls))}]<|python_end|>",
        "<|python_start|>[get_forecast(city=)]<|python_end|>",
        "llama4_pythonic",
        NO_TEXT,
    ),
    Family(
        "olmo3",
        lambda calls: "<function_calls>" + "\n".join(in_python(calls)) + "</function_calls>",
        "<function_calls>get_forecast(city=)</function_calls>",
    ),
    Family("xlam", as_list("", ""), f"[{BAD_JSON}]", unread=NO_TEXT),
    Family(
        "seed_oss",
        functions_in("<seed:tool_call>", "</seed:tool_call>"),
        "<seed:tool_call>\nno function\n</seed:tool_call>",
        "seed_oss",
    ),
    Family("minimax_m2", minimax_m2, "<minimax:tool_call>\nget_forecast\n</minimax:tool_call>", "minimax_m2"),
    Family(
        "longcat",
        in_tags("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        f"<longcat_tool_call>\n{BAD_JSON}\n</longcat_tool_call>",
    ),
    Family("hunyuan_a13b", as_list("<tool_calls>", "</tool_calls>"), f"<tool_calls>[{BAD_JSON}]</tool_calls>"),
    Family("ernie45", in_tags("<tool_call>\n", "\n</tool_call>\n"), f"<tool_call>\n{BAD_JSON}\n</tool_call>"),
    Family(
        "step3",
        step3,
        "<｜tool_calls_begin｜>get_forecast<｜tool_calls_end｜>",
        "step3",
        (("nested", "vLLM 0.32 leaves an object as its text"),),
    ),
    Family("functiongemma", functiongemma, "<start_function_call>get_forecast<end_function_call>"),
    Family(
        "gigachat3",
        lambda calls: "function call<|role_sep|>\n" + json_calls(calls)[0],
        f"function call<|role_sep|>\n{BAD_JSON}",
        "gigachat3",
        (ONE_CALL, ("text after", "the form ends with the call")),
    ),
]
