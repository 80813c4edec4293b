"""Docstrings and comments of the product are plain: short sentences that begin with a subject.

A drawing is no prose: lines with tile characters or with two spaces inside are left out.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WORDS, MAX_LONG = 25, 0.01
BACKWARDS = re.compile(r"(Of|Such|So many|Who|Whoever|Whom|What|Nobody|Somebody)\b")
"""The subject of a sentence that begins so is a clause, or nobody."""
DRAWN = re.compile(r"[─│┌└├┤▶◀═]|\S  +\S|^\s*\||^\s{4,}")


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each paragraph, and each sentence of it."""
    for line, text in texts(path):
        for paragraph in re.split(r"\n\s*\n", text):
            lines = [one for one in paragraph.splitlines() if not DRAWN.search(one)]
            for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`])", " ".join(lines)):
                if len(one.split()) > 2:
                    yield line, one.strip()


def texts(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            docstring = ast.get_docstring(ast.Module(body=[node], type_ignores=[]))
            if docstring is not None:
                yield node.lineno, docstring
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            first = first if lines else token.start[0]
            lines.append(token.string.removeprefix("#").removeprefix(" "))
        elif token.type not in (tokenize.NL, tokenize.COMMENT) and lines:
            yield first, "\n".join(lines)
            lines = []


def test_few_sentences_are_long_and_none_begins_backwards() -> None:
    found, long, backwards = 0, list[str](), list[str]()
    for path in sorted([*ROOT.glob("kvbus/**/*.py"), *ROOT.glob("services/**/*.py")]):
        for line, sentence in sentences(path):
            found += 1
            named = f"{path.relative_to(ROOT)}:{line}: {sentence}"
            if BACKWARDS.match(sentence):
                backwards.append(named)
            elif len(sentence.split()) > MAX_WORDS:
                long.append(named)

    assert found > 3000
    assert not backwards, "\n".join(backwards)
    assert len(long) <= MAX_LONG * found, "\n".join(long)
