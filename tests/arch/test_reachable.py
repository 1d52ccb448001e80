"""Nothing is here that no command reaches: modules by the import graph, names by their uses.

Three passes over the syntax trees. A module counts if `penstock`'s commands import it, directly or not. A function,
class or constant of a module counts if the module itself uses it or another one imports it. A method, attribute, field
or variable counts if its name is used anywhere (vulture). What is found by name at run time is used: an import path in
conf/, and as a string in the code the name of an actor's method or a registry's `module:function`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from vulture.core import Vulture

ROOT = Path(__file__).parents[2]
PROJECT = ("actors", "conf", "dataflow", "envs", "kernels", "platform", "rollout", "trainer", "weights")
COMMANDS = "penstock.platform.cli.main"
LOSSES = "penstock.trainer.algorithms.losses."
"""Modules that the catalog of algorithms finds by their folder; what has its decorator, `@Entry`, is found in it."""
IMPORT_PATH = re.compile(r"\bpenstock(?:\.\w+)+(?::\w+)?")
IN_THE_PACKAGE = re.compile(r"(\w+):(\w+)")
DECORATORS = [
    "@*.command",
    "@*.callback",
    "@model_validator",
    "@field_validator",
    "@field_serializer",
    "@model_serializer",
    "@*.jit",
]
"""What is decorated so is called by typer, pydantic or Triton."""

ALLOWED = {
    "envs/tools/mcp_tools.py": "users name it in their own environment (docs/guides/tools-and-agents.md)",
    "envs/tools/mcp_tools.py:McpToolEnvironment": "the same",
    "envs/rewards/formats.py:*": "rewards of a form, which users name in reward.parts (docs/guides/sandbox.md)",
    "envs/workers/episode_child.py:main": "what the supervisor calls in the process that it started for this module",
    "envs/workers/reward_child.py:main": "the same",
    "envs/workers/task_child.py:main": "the same",
    "envs/sandbox/runner.py:main": "local.py sends this module to the interpreter in a sandbox, which calls it",
    "envs/sandbox/runner.py:get_source": "the standard library's linecache calls it",
    "envs/endpoint/chat_api.py:include_obfuscation": "clients of the OpenAI API send it; it changes nothing here",
    "envs/endpoint/server.py:content_type": "an attribute of aiohttp's response",
    "envs/tasks/repositories.py:mtime": "an attribute of an entry of tarfile",
    "envs/rewards/judge.py:__signature__": "inspect.signature reads it",
    "envs/rewards/peer_styles.py:__signature__": "the same",
    "kernels/torch_companions.py": "src/penstock/__init__.py imports it",
    "kernels/torch_companions.py:mend_imports": "the same",
    "kernels/torch_companions.py:vllm_plugin": "vLLM calls it (pyproject.toml, entry points)",
    "kernels/float32_head.py:__class__": "how the forward of a module of torch is changed",
    "platform/metrics/console.py:on_broken_pipe": "rich calls it",
    "platform/metrics/trackers/config.py:jsonl": "a tracker that is always on, which users may name as the others",
    "platform/metrics/summary.py:*": "fields of summary.json, written by dataclasses.asdict",
    "platform/simulator/virtual_loop.py:*": "what it gives asyncio's loop instead of a selector and a clock",
    "rollout/tokenization/tokenizers.py:pre_tokenizer": "an attribute of the tokenizers library",
    "rollout/engines/vllm/cpu_build.py:cpu_linear": "vLLM's linear layers call it",
    "rollout/engines/vllm/cpu_build.py:_forward_method": "vLLM's layer calls it",
    "rollout/engines/vllm/cpu_build.py:dispatch_cpu_unquantized_gemm": "vLLM's linear layers call it",
    "rollout/engines/vllm/engine.py:log_engine_initialized": "vLLM calls it",
    "rollout/engines/vllm/layout.py:static_all_moe_layers": "vLLM reads it",
    "rollout/engines/vllm/worker.py:*": "vLLM loads its classes by name and calls their methods (worker_extension_cls)",
    "trainer/backends/deepspeed.py:_hf_config": "kept, since transformers has a weak reference to it",
    "trainer/micro_batches.py:greedy_accuracy": "a field of a tuple that platform/run/offline_training.py unpacks",
    "trainer/micro_batches.py:sampled_accuracy": "the same",
    "weights/transport/process_group/group.py:_timeout": "an attribute of torch's process group",
}
"""What no pass finds a use of -> why it is here. A module by its path, a name by `path:name`, a file by `path:*`."""


class Module:
    """One module's syntax tree, walked once.

    Attributes:
        uses: Of each statement at the top: the names it reads, and the words of its strings (annotations).
        imports: Dotted names that it imports, reads from an imported module, or has in a string.
        strings: What stands in quotes, docstrings aside.
        entered: Functions that the catalog of algorithms finds by their decorator.
    """

    def __init__(self, path: Path, relative: Path) -> None:
        self.path = relative.as_posix()
        self.uses: list[tuple[ast.stmt, Counter[str]]] = []
        self.strings: set[str] = set()
        self.entered: set[str] = set()
        package = ["penstock", *relative.parts[:-1]]
        aliases: dict[str, str] = {}
        attributes: list[tuple[str, str]] = []
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            names: Counter[str] = Counter()
            if isinstance(statement, ast.FunctionDef) and is_entered(statement):
                self.entered.add(statement.name)
            for node in nodes_without_docstrings(statement):
                if isinstance(node, ast.Name):
                    names[node.id] += isinstance(node.ctx, ast.Load)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    attributes.append((node.value.id, node.attr))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    self.strings.add(node.value)
                    names.update(re.findall(r"\w+", node.value))
                elif isinstance(node, ast.Import):
                    aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    above = package[: len(package) - node.level + 1] if node.level else []
                    base = ".".join([*above, *([node.module] if node.module else [])])
                    aliases |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            self.uses.append((statement, names))
        self.imports = set(aliases.values())
        self.imports |= {f"{aliases[name]}.{attribute}" for name, attribute in attributes if name in aliases}
        for text in self.strings:
            self.imports |= {name.replace(":", ".") for name in IMPORT_PATH.findall(text)}
            if match := IN_THE_PACKAGE.fullmatch(text):
                self.imports.add(".".join([*package, match[1], match[2]]))


def nodes_without_docstrings(statement: ast.stmt) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node
            waiting += ast.iter_child_nodes(node)


class Project:
    """The modules under a root, by dotted name, and what conf/ names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for folder in PROJECT:
            for path in sorted((root / folder).rglob("*.py")):
                relative = path.relative_to(root)
                name = ".".join(["penstock", *relative.with_suffix("").parts]).removesuffix(".__init__")
                self.modules[name] = Module(path, relative)
        texts = (path.read_text(encoding="utf-8") for path in sorted((root / "conf").rglob("*.yaml")))
        self.named_in_conf = {name.replace(":", ".") for text in texts for name in IMPORT_PATH.findall(text)}

    def modules_of(self, names: Iterable[str]) -> Iterator[str]:
        """The modules that dotted names are, or are in."""
        for name in names:
            parts = name.split(".")
            while parts and ".".join(parts) not in self.modules:
                parts.pop()
            if parts:
                yield ".".join(parts)


def unreachable_modules(project: Project) -> list[str]:
    """Paths of modules that no command imports, that conf/ does not name and that no registry names."""
    found_by_folder = [name for name in project.modules if name.startswith(LOSSES)]
    waiting = list(project.modules_of([COMMANDS, "penstock.conf", *project.named_in_conf, *found_by_folder]))
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += project.modules_of(project.modules[name].imports)
    return [module.path for name, module in project.modules.items() if name not in reached]


def unused_definitions(project: Project) -> list[str]:
    """`path:name` of definitions at the top of a module that neither it nor another module uses."""
    imported = project.named_in_conf.union(*(module.imports for module in project.modules.values()))
    found = []
    for dotted, module in project.modules.items():
        in_all = sum((names for _, names in module.uses), Counter[str]())
        found += [
            f"{module.path}:{name}"
            for statement, own in module.uses
            for name in defined_names(statement)
            if f"{dotted}.{name}" not in imported and in_all[name] == own[name]
        ]
    return found


def is_entered(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(one).startswith("Entry(") for one in statement.decorator_list)


def defined_names(statement: ast.stmt) -> list[str]:
    """Functions, classes and constants; not what typer calls or the catalog of algorithms finds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if is_entered(statement):
            return []
        decorators = [ast.unparse(one) for one in statement.decorator_list]
        return [] if any(".command" in one or ".callback" in one for one in decorators) else [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [name for name in names if name != "__all__"]


def unused_names(project: Project) -> list[str]:
    """`path:name` of methods, attributes, fields and variables whose name is used nowhere, by vulture."""
    vulture = Vulture(ignore_decorators=DECORATORS)
    vulture.scavenge([project.root / folder for folder in PROJECT if (project.root / folder).exists()])
    used = {text.rpartition(":")[2] for module in project.modules.values() for text in module.strings}
    used |= {name.rpartition(".")[2] for name in project.named_in_conf}
    used |= {name for module in project.modules.values() for name in module.entered}
    for template in (project.root / "platform").rglob("*.j2"):
        used |= set(re.findall(r"\w+", template.read_text(encoding="utf-8")))
    items = vulture.get_unused_code(min_confidence=60)
    return [
        f"{item.filename.relative_to(project.root).as_posix()}:{item.name}" for item in items if item.name not in used
    ]


def everything_unused(root: Path) -> list[str]:
    project = Project(root)
    return sorted({*unreachable_modules(project), *unused_definitions(project), *unused_names(project)})


def allowing(found: str) -> str | None:
    """The entry of the allow-list that covers it."""
    return next((entry for entry in (found, f"{found.partition(':')[0]}:*") if entry in ALLOWED), None)


@pytest.fixture(scope="module")
def unused() -> list[str]:
    return everything_unused(ROOT)


def test_everything_is_reached_by_a_command(unused: list[str]) -> None:
    assert [found for found in unused if allowing(found) is None] == [], (
        "no command reaches these. Delete them, with their tests; allow only what a user or a library names"
    )


def test_what_is_allowed_is_there_and_needs_to_be_allowed(unused: list[str]) -> None:
    assert ALLOWED.keys() - {allowing(found) for found in unused} == set(), "delete these entries: nothing needs them"


LIVING = {
    "conf/__init__.py": "",
    "conf/reward/form.yaml": "reward: {fn: penstock.envs.named.by_conf}",
    "platform/cli/main.py": "from penstock.platform.run import training as start\n\nstart.train()\n",
    "platform/run/training.py": """
from penstock.trainer.step import Step

def train():
    Step(1).run("publish", "losses:own")
""",
    "trainer/step.py": """
from dataclasses import dataclass

@dataclass
class Step:
    index: int

    def run(self, *names):
        return _helper(self.index, names)

    def publish(self):
        "By name, as of an actor."

def _helper(*args):
    return args
""",
    "envs/named.py": "def by_conf():\n    pass\n",
}
PLANTED = {
    "a dead module": ("trainer/unheard.py", "import torch", "trainer/unheard.py"),
    "a module that only a dead one imports": (
        "trainer/unheard.py",
        "from penstock.envs import also_unheard",
        "trainer/unheard.py",
    ),
    "a dead function": ("trainer/step.py", "\ndef forgotten():\n    pass\n", "trainer/step.py:forgotten"),
    "one that calls only itself": (
        "envs/named.py",
        "\ndef forgotten():\n    return forgotten()\n",
        "envs/named.py:forgotten",
    ),
    "one named like a method that is used": ("envs/named.py", "\ndef run():\n    pass\n", "envs/named.py:run"),
    "a dead class": (
        "platform/run/training.py",
        "\nclass Forgotten:\n    pass\n",
        "platform/run/training.py:Forgotten",
    ),
    "a dead method": (
        "trainer/step.py",
        "\nclass Other:\n    def forgotten(self): ...\n\nOther()\n",
        "trainer/step.py:forgotten",
    ),
    "a dead field": (
        "trainer/step.py",
        "\n@dataclass\nclass Pair:\n    forgotten: int\n\nPair(1)\n",
        "trainer/step.py:forgotten",
    ),
    "a dead constant": ("trainer/step.py", "\nFORGOTTEN = 3\n", "trainer/step.py:FORGOTTEN"),
}


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        with (root / path).open("a", encoding="utf-8") as file:
            file.write(text)


def test_what_lives_is_not_reported(tmp_path: Path) -> None:
    write(tmp_path, LIVING)
    assert everything_unused(tmp_path) == []


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_planted_dead_is_found(tmp_path: Path, case: str) -> None:
    path, text, expected = PLANTED[case]
    imported_by_it = "envs/also_unheard.py"
    write(tmp_path, LIVING | ({imported_by_it: ""} if "only a dead one" in case else {}))
    write(tmp_path, {path: text})
    found = everything_unused(tmp_path)
    assert expected in found
    assert (imported_by_it in found) == ("only a dead one" in case)
