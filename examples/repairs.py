"""Repositories with a mistake, which a command-line agent repairs; docs/guides/agents.md goes through it.

In this folder:

    penstock train experiment=text env=repository env.args.tasks=repairs:Repairs \\
        'env.args.agent=[python, small_agent.py, "{prompt}"]' 'env.args.read=[small_agent.py]' reward=episode \\
        name=repairs
"""

from penstock.envs.adapters.rows import RowTasks

MISTAKES = {
    "sums.py": ("def add(a, b):\n    return a - b\n", "s/a - b/a + b/", "add({0}, 1) == {0} + 1"),
    "words.py": ("def first(text):\n    return text.split()[1]\n", "s/1/0/", "first('{0} more') == '{0}'"),
    "ranges.py": ("def upto(n):\n    return list(range(n))\n", "s/range(n)/range(1, n + 1)/", "upto({0})[-1] == {0}"),
}


def rows():
    for name, (code, fix, expected) in MISTAKES.items():
        for number in range(1, 9):
            is_right = expected.format(number)
            yield {
                "prompt": f"Repair {name}: {is_right}.",
                "files": {name: code},
                "hidden": {"hidden_test.py": f"from {name.removesuffix('.py')} import *\nassert {is_right}\n"},
                "tests": "python hidden_test.py",
                "fix": f"sed -i '{fix}' {name}",  # for gold_actions; the agent sees only the prompt and the files
            }


class Repairs(RowTasks):
    def __init__(self, seed):
        super().__init__(seed, rows="repairs:rows", held_out="train")

    def gold_actions(self, task):  # only for `penstock env check`
        return [f"```sh\n{task.fields['fix']}\n```", "Done."]
