"""``python -m tests.lint.wording``: list words and phrases that have a plainer standard term, with their places.

It reads docstrings, comments and text literals of the package, and the documents. Vale and proselint check the same
kind of list for documents, but they do not read string literals of Python, where help texts and error messages are.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"told|untold": "reported, notified, passed",
    r"stands (?:in|beside|on|at|there|where|by)|it stands": "is in, is next to; means",
    r"in the place of": "instead of",
    r"(?:is|are|was|were) gone": "is dead, lost, missing",
    r"go(?:es|ing)? on|went on": "resume, continue",
    r"c(?:o|a)mes? to": "reach, total",
    r"of which|of whom": "split the sentence",
    r"whose": "split the sentence, or 'with'",
    r"take(?:s|n)? (?:its|their) turns?|in turns": "interleave",
    r"(?:was|were) seen": "was measured, was observed",
    r"so many": "N, that many",
    r"anew": "again, new",
    r"what is held|is held of": "name the thing",
    r"at hand": "available",
    r"behind (?:it|that|the last|one)|one behind": "after",
    r"nothing of": "none of",
    r"that is not to": "must not",
    r"(?:is|are) no (?:more|noise)": "is significant; no longer",
    r"makes? of": "builds from",
    r"amid": "during",
    r"beside": "next to, besides, in addition to",
}
"""A pattern, matched as whole words whatever the case, and what to write instead."""

_WORDS = re.compile("|".join(rf"(?P<w{n}>\b(?:{pattern})\b)" for n, pattern in enumerate(INSTEAD)), re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, comment and literal that holds a sentence."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def of_document(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a Markdown file, without code."""
    plain = _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    yield from enumerate(plain.splitlines(), 1)


def found(path: Path) -> Iterator[str]:
    """A line for each match in a file."""
    name = str(path.relative_to(ROOT))
    read = of_python if path.suffix == ".py" else of_document
    for first, text in read(path.read_text()):
        for match in _WORDS.finditer(text):
            around = text[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
            line = first + text.count("\n", 0, match.start())
            instead = [*INSTEAD.values()][int(str(match.lastgroup)[1:])]
            yield f"{name}:{line}: {match[0]!r} in {around.strip()!r}: {instead}"


def main() -> int:
    """List what was found. Returns 1 where that is anything."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    lines = [line for path in sorted([*documents, *ROOT.glob("hvdtrain/**/*.py")]) for line in found(path)]
    print(*lines, f"{len(lines)} to be said in plainer words", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
