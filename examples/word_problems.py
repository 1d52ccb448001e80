r"""GSM8K on any Hugging Face model: word problems with worked answers, and a reward that reads `\boxed{}`.

    cd examples
    python word_problems.py
    penstock train experiment=text env=gsm8k env.args.dataset=word_problems env.args.subset=null \
        reward.fn=word_problems:score rollout.sampling.max_new_tokens=128 name=word_problems

The script writes `word_problems/train.jsonl` and `test.jsonl` with the columns of GSM8K. GSM8K itself is
`env.args.dataset=openai/gsm8k env.args.subset=main`, another model `model.path=NAME`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import math_verify

from penstock.dataflow.trajectory import Trajectory

SPLITS = {"train": 2000, "test": 200}
NAMES = ["Ana", "Ben", "Chen", "Dara", "Emil", "Fatou"]
THINGS = ["pens", "stamps", "apples", "shells", "marbles", "books"]


def problem(rng: random.Random) -> dict[str, str]:
    """A question, and an answer in GSM8K's form: the steps, then `#### result`."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    has, boxes, each, gives = rng.randint(2, 50), rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
    bought, left = boxes * each, has + boxes * each - gives
    question = (
        f"{name} has {has} {things}. {name} buys {boxes} boxes with {each} {things} in each and gives {gives} {things} "
        f"to a friend. How many {things} does {name} have left?"
    )
    steps = f"{name} buys {boxes}*{each}={bought} {things}.\n{has}+{bought}-{gives}={left} are left."
    return {"question": question, "answer": f"{steps}\n#### {left}"} if left >= 0 else problem(rng)


def score(trajectory: Trajectory, answer: str, **_: object) -> dict[str, float]:
    """1 if the final answer is equal to the gold answer; 0.1 for the box, so that a weak policy learns the form."""
    said = trajectory.response
    gold, final = (math_verify.parse(text, parsing_timeout=None) for text in (f"\\boxed{{{answer}}}", said))
    is_right = math_verify.verify(gold, final, timeout_seconds=None)
    return {"right": 0.9 * is_right, "boxed": 0.1 * ("\\boxed{" in said)}


if __name__ == "__main__":
    rng, folder = random.Random(0), Path("word_problems")
    folder.mkdir(exist_ok=True)
    for split, count in SPLITS.items():
        rows = [problem(rng) for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
