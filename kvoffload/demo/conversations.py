"""The demo's conversations: questions about real, long texts."""

from dataclasses import dataclass
from pathlib import Path

import kvoffload
from kvoffload.demo.sampling import encode

SYSTEM = (
    "You are a careful reader. Answer questions about the text below, quote it where you can, and "
    "say so when it does not hold the answer.\n\n"
)
QUESTIONS = (
    "\n\nQ: What is this text about, in one sentence?\nA:",
    "\n\nQ: Which part of it would a newcomer misunderstand first?\nA:",
    "\n\nQ: What does it promise, and what does it leave to others?\nA:",
    "\n\nQ: What should its reader do next?\nA:",
)
"""One a turn."""


@dataclass(frozen=True)
class Conversation:
    """A text that several questions are asked about; token ids throughout.

    Ids, not text, because each turn's prompt must begin with exactly the tokens of the turn before
    and of the answer it got.
    """

    title: str
    opening: tuple[int, ...]

    def prompt(self, answers: list[list[int]]) -> list[int]:
        """Return the prompt of the turn after these answers."""
        tokens = [*self.opening, *encode(QUESTIONS[0])]
        for answer, question in zip(answers, QUESTIONS[1:], strict=False):
            tokens += [*answer, *encode(question)]
        return tokens


def conversations(count: int, prompt_tokens: int) -> list[Conversation]:
    """Make conversations whose first prompts have about ``prompt_tokens`` tokens.

    Their texts are the project's own: its pages in a checkout, and the source files of the package.
    """
    system = encode(SYSTEM)
    wanted = prompt_tokens - len(system) - len(encode(QUESTIONS[0]))
    found: list[Conversation] = []
    for path in _texts():
        tokens = encode(path.read_text(encoding="utf-8"))[:wanted]
        if len(tokens) == wanted:
            found.append(Conversation(path.name, (*system, *tokens)))
    return found[:count]


def _texts() -> list[Path]:
    package = Path(kvoffload.__file__).parent
    pages = (
        sorted(package.parent.glob("*.md")) if (package.parent / "pyproject.toml").exists() else []
    )
    return pages + sorted(p for p in package.rglob("*.py") if p.name != "__init__.py")
