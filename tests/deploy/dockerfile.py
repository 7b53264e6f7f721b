"""A Dockerfile as its stages and their instructions. Knows what Tandem's use: no heredocs, no ONBUILD. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `RUN`, `COPY`, … and the rest of its lines, joined."""

    word: str
    rest: str


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next; `image` has the arguments' defaults filled in."""

    name: str
    image: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """What stands behind each such instruction."""
        return [each.rest for each in self.instructions if each.word == word]

    def last(self, word: str) -> str:
        """What stands behind the last one, which is in force. Raises IndexError without any."""
        return self.all(word)[-1]

    def command(self, word: str) -> list[str]:
        """The last ENTRYPOINT or CMD, which must be a JSON list: as a string it would run in a shell."""
        command = json.loads(self.last(word))
        assert isinstance(command, list)
        return command


def parse(text: str) -> dict[str, Stage]:
    """Stages by name, in order."""
    stages: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    stage: Stage | None = None
    for instruction in _instructions(text):
        if instruction.word == "FROM":
            image, _, name = re.fullmatch(r"(\S+)(?: (AS|as) (\S+))?", instruction.rest).groups()  # type: ignore[union-attr]
            stage = Stage(name or str(len(stages)), _filled(image, defaults))
            stages[stage.name] = stage
        elif stage is None:
            name, _, value = instruction.rest.partition("=")
            defaults[name] = value
        else:
            stage.instructions.append(instruction)
    return stages


def ignored(rules: str, path: str) -> bool:
    """Whether a `.dockerignore` keeps a path of the context out: the last rule that matches it decides."""
    out = False
    for line in rules.splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#") and _matches(rule.removeprefix("!"), path):
            out = not rule.startswith("!")
    return out


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*re.split(r"\s+", line, maxsplit=1)) for line in joined.splitlines()]


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], text)


def _matches(rule: str, path: str) -> bool:
    """Whether the rule names the path or a folder above it."""
    pattern = re.escape(rule).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(f"{pattern}(?:/.*)?", path) is not None
