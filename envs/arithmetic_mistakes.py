"""Worked answers with one mistake, as a half-trained policy makes them: what follows it is consistent with it.

648+257=  8+7+0=15;4+5+1=10;6+2+1=9;905       right
8+7+0=14;4+5+1=10;6+2+1=9;904       `sum`: one off, and the answer follows
8+7+0=15;4+3+1=8;6+2+0=8;885        `digit`: copied wrong, and summed up right
8+7+0=15;4+5+0=9;6+2+0=8;895        `carry`: forgotten or invented
8+7+0=15;4+5+1=10;6+2+1=9;915       `answer`: one digit of it off by one
"""

from __future__ import annotations

import random

from penstock.envs.arithmetic import Problem

KINDS = ("sum", "digit", "carry", "answer")


def mistaken_response(problem: Problem, rng: random.Random) -> str:
    """Worked columns with one mistake, then the answer that comes of them; it differs from the right ones."""
    left, right = str(problem.left), str(problem.right)
    width = max(len(left), len(right))
    kind, place = rng.choice(KINDS), rng.randrange(width)
    is_sum = problem.operator == "+"
    steps, digits, carry = [], [], 0
    columns = zip(map(int, reversed(left.zfill(width))), map(int, reversed(right.zfill(width))), strict=True)
    for column, (above, below) in enumerate(columns):
        slips = kind if column == place else None
        b = (below + rng.choice((-1, 1, 2, 3))) % 10 if slips == "digit" else below
        carried = 1 - carry if slips == "carry" else carry
        off = rng.choice((-1, 1)) if slips == "sum" else 0
        if is_sum:
            result = abs(above + b + carried + off)
            top, carry = above, result // 10
        else:
            carry = int(above < b + carried)
            top = above + 10 * carry
            result = (top - b - carried + off) % 10
        steps.append(f"{top}{problem.operator}{b}{'+' if is_sum else '-'}{carried}={result}")
        digits.append(result % 10)
    answer = int("".join(map(str, reversed(digits)))) + (10**width * carry if is_sum else 0)
    if kind == "answer":
        step = 10**place
        answer += step if answer < step else rng.choice((-step, step))
    return ";".join([*steps, str(answer)])
