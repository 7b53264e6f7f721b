"""Makes the text that the demo model is trained on: short stories, and questions about their facts.

Who is given which things and shown which places differs from story to story, so a right answer can only
come from the story's own tokens: a lost or foreign KV block shows as a wrong answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = "Mira Tom Lena Oskar Ida Paul Nora Felix Emma Jonas Clara Hugo Lotte Anton Greta Max".split()
COLORS = "red blue green yellow white black golden silver brown purple".split()
THINGS = "kites lamps drums boats hats clocks bells cups coats flutes maps rings books chairs keys baskets".split()
PLACES = "rivers mills harbours forests bridges markets towers lakes gardens stations meadows wells".split()
FOODS = "bread soup apples honey cheese plums nuts pancakes berries rice".split()
FILLERS = (
    "The wind was soft that day.",
    "Then it rained a little.",
    "A bird sang in the old tree.",
    "Everyone was glad about it.",
    "The evening came early.",
    "Nobody was in a hurry.",
    "The sun stood high over the roofs.",
    "It was quiet for a while.",
)
OPENINGS = (
    "Once upon a time there was a small town.",
    "One morning the town woke up early.",
    "It was the first day of spring.",
    "This is a story about some friends.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence of a story, and the question that this sentence answers whole."""

    sentence: str
    question: str


@dataclass(frozen=True, slots=True)
class Story:
    """A story and its facts."""

    text: str
    facts: tuple[Fact, ...]


def make_story(rng: random.Random, num_people: int) -> Story:
    """Draws a story, a sentence a line, in which `num_people` people each have two or three facts."""
    people = rng.sample(NAMES, num_people)
    facts = [fact for name in people for fact in _facts_of(rng, name)]
    rng.shuffle(facts)
    sentences = [rng.choice(OPENINGS)]
    for fact in facts:
        sentences.append(fact.sentence)
        if rng.random() < 0.3:
            sentences.append(rng.choice(FILLERS))
    return Story("\n".join(sentences), tuple(facts))


def _facts_of(rng: random.Random, name: str) -> list[Fact]:
    color, thing, place, food = (rng.choice(words) for words in (COLORS, THINGS, PLACES, FOODS))
    facts = [
        Fact(f"They gave {name} {color} {thing}.", f"What did they give {name}?"),
        Fact(f"They showed {name} {place}.", f"What did they show {name}?"),
        Fact(f"They served {name} {food}.", f"What did they serve {name}?"),
    ]
    return rng.sample(facts, rng.randint(2, 3))
