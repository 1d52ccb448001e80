"""Questions about stated facts: rows, held-out rows, larger ones, and an exact reward.

`rows` asks for what one of two sentences says, `hops` for what two of six say (`hops_of_two`: of four), of which the
second follows from the first. In `more` and `more_hops` there are more facts than any task that is trained on has.

    Nora is a baker in Oslo. Omar is a pilot in Lima. In which city does the pilot work? Answer with the city only.

    Omar is a pilot. The baker works in Oslo. Nora is a baker. The pilot works in Lima. First say what Omar is, then in
    which city Omar works.
"""

from __future__ import annotations

import hashlib
import random
import re

NAMES = [
    "Ada", "Amir", "Bella", "Boris", "Carla", "Chen", "Dana", "Diego", "Elena", "Emil", "Farah", "Felix",
    "Gina", "Goran", "Hana", "Hugo", "Ines", "Ivan", "Jana", "Jonas", "Kira", "Kofi", "Lena", "Luca", "Mara",
    "Milo", "Nora", "Omar", "Paula", "Pedro", "Rosa", "Ravi", "Sara", "Sven", "Tara", "Timo", "Uma", "Viktor",
    "Wanda", "Yusuf",
]  # fmt: skip
JOBS = [
    "baker", "banker", "barber", "butcher", "carpenter", "chemist", "dentist", "doctor", "driver", "farmer",
    "florist", "gardener", "lawyer", "librarian", "nurse", "painter", "pilot", "plumber", "tailor", "teacher",
]  # fmt: skip
CITIES = [
    "Accra", "Athens", "Berlin", "Bogota", "Boston", "Cairo", "Chicago", "Dallas", "Delhi", "Denver", "Dublin",
    "Geneva", "Hanoi", "Houston", "Istanbul", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Miami", "Milan",
    "Moscow", "Nairobi", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Vienna",
]  # fmt: skip
NUM_ROWS = 6000
HELD_OUT = 0.1
Person = tuple[str, str, str]
"""Name, job, city."""


def rows() -> list[dict]:
    """Two people, as the policy is trained."""
    return _split(stated, num_people=2, held_out=False)


def held_out() -> list[dict]:
    """Two people. No set of facts is in `rows` too, in whatever order and whichever of them is asked for."""
    return _split(stated, num_people=2, held_out=True)


def more() -> list[dict]:
    """Four people: larger than anything that is trained."""
    return _split(stated, num_people=4, held_out=True)


def hops_of_two() -> list[dict]:
    return _split(two_hops, num_people=2, held_out=False)


def hops() -> list[dict]:
    return _split(two_hops, num_people=3, held_out=False)


def held_out_hops() -> list[dict]:
    return _split(two_hops, num_people=3, held_out=True)


def more_hops() -> list[dict]:
    return _split(two_hops, num_people=5, held_out=True)


def stated(people: list[Person], asked: Person, _rng: random.Random) -> str:
    """One sentence says it."""
    facts = " ".join(f"{name} is a {job} in {city}." for name, job, city in people)
    return f"{facts} In which city does the {asked[1]} work? Answer with the city only."


def two_hops(people: list[Person], asked: Person, rng: random.Random) -> str:
    """One sentence says what a person is, another one where people of this profession work."""
    facts = [f"{name} is a {job}." for name, job, _ in people] + [
        f"The {job} works in {city}." for _, job, city in people
    ]
    rng.shuffle(facts)
    return f"{' '.join(facts)} First say what {asked[0]} is, then in which city {asked[0]} works."


def _split(question, *, num_people: int, held_out: bool) -> list[dict]:
    """A tenth of all sets of facts, or the others."""
    rng = random.Random(f"{question.__name__} {num_people}")
    found: dict[str, dict] = {}
    while len(found) < NUM_ROWS:
        names, jobs, cities = (rng.sample(one, num_people) for one in (NAMES, JOBS, CITIES))
        people = list(zip(names, jobs, cities, strict=True))
        asked = rng.choice(people)
        facts = " ".join(sorted(map(str, people)))
        digest = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:4], "big")
        prompt = question(people, asked, rng)
        found[prompt] = {
            "prompt": [{"role": "user", "content": prompt}],
            "answer": asked[2],
            "name": asked[0],
            "job": asked[1],
            "is_held_out": digest < HELD_OUT * 2**32,
        }
    shown = ("prompt", "answer", "name", "job")
    return [{key: row[key] for key in shown} for row in found.values() if row["is_held_out"] == held_out]


def names_the_city(trajectory, answer: str, **_) -> float:
    """1 if the answer names the right city and no other."""
    return float(_named(trajectory.response, CITIES) == {answer})


def says_the_job(trajectory, name: str, job: str, **_) -> float:
    """1 if the answer says what the person is and names no other profession."""
    is_said = re.search(rf"\b{name} is an? {job}\b", trajectory.response) is not None
    return float(is_said and _named(trajectory.response, JOBS) == {job})


def _named(text: str, known: list[str]) -> set[str]:
    return set(re.findall(r"\w+", text)) & set(known)
