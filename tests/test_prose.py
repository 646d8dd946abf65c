"""Wording of docstrings, comments and messages: standard vocabulary and one-line summaries."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("recipes", "resources", "hanzo_ml", "hanzo_ml_assets", "sensors", "api", "deploy", "benchmarks", "tests")
TESTS = ROOT / "tests"
PINNED = ROOT / "resources" / "metadata" / "migrations" / "versions"
"""Migrations that landed are never changed, not even their prose."""
STORED = ("lines of the version, by all that is asked",)
"""Texts that are hashed or stored, which never change."""

MAX_SUMMARY_WORDS = 15

VAGUE = re.compile(
    r"""\b(?:
        told | tells? | telling | anew | whoever | whomever | whatever | besides? | thereof | wherefrom
        | nobody | somebody | anybody | everybody
        | stands(?!\s+in\s+for) | stood | lies | brought | owed | heals? | healed | healing
        | (?:the|an?|each|every|one|its|whose|this|that|own)\s+takings?
        | (?:goes|gone|go|going|went)\s+(?:on|along|with|without|by)
        | (?:is|are|was|were|been|be)\s+(?:asked(?!\s+to\b)|looked(?!\s+up\b))
        | (?:looks?|looked|looking)\s+at | looks\s+for
        | (?:makes?|becomes?|became|comes?|came)\s+of
        | (?:is|are|was|were|be)\s+at\s+work | of\s+so\s+many
        | has\s+it\s+that | of\s+itself | its\s+like | the\s+like
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Words that an engineer would neither search for nor understand without knowing this code."""
CITATION = re.compile(r"\brows?\s+[A-Z]{1,2}\d+")
"""A row of the acceptance table, which is no part of the repository: say the requirement itself."""
YAML_COMMENT = re.compile(r"(?:^|\s)#\s?(.*)$")

CODE = re.compile(r"`[^`]+`")
"""Quoted code, such as a stored name, is exempt."""


def test_prose_follows_the_rules() -> None:
    found = [f"{name}:{finding}" for name, findings in findings_by_file().items() for finding in findings]
    assert not found, "reword (rules: tests/test_prose.py):\n" + "\n".join(found)


def test_rules_find_vague_words_citations_and_long_summaries() -> None:
    source = '''"""Module. With two lines
of summary."""

def load() -> None:
    """One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."""
    # whoever is told goes
    # on (row A5)
    raise ValueError(f"{1} stands beside the file")


NAMES = ("told", "x")
'''
    assert python_findings(source) == [
        "1: summary is longer than one line",
        "5: summary is longer than 15 words",
        "6: whoever",
        "6: told",
        "6: goes on",
        "6: row A5",
        "8: stands",
        "8: beside",
    ]


def test_rules_accept_standard_prose() -> None:
    assert not python_findings(
        '"""Load a file.\n\nThe offset is `tell()`. Resume from it."""\nTOLD = "told"  # a stored name\n'
    )
    assert python_findings("x = 1\n") == ["1: module without docstring"]


def findings_by_file() -> dict[str, list[str]]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    texts = {path: path.read_text() for path in sorted(found) if PINNED not in path.parents}
    return {
        path.relative_to(ROOT).as_posix(): yaml_findings(text)
        if path.suffix == ".yaml"
        else python_findings(text, path.stem, strings=TESTS not in path.parents)
        for path, text in texts.items()
    }


def python_findings(source: str, module: str = "", *, strings: bool = True) -> list[str]:
    """Findings of one module as `line: what`, in the order of the lines.

    With `strings` in all strings, else in docstrings alone.
    """
    tree = ast.parse(source)
    found = [*summary_findings(tree, source, module)]
    texts = [*string_texts(tree)] if strings else [*docstring_texts(tree)]
    possible = " ".join(line.partition("#")[2] for line in source.splitlines() if "#" in line)
    if any(rule.search(re.sub(r"\s+#?\s*", " ", possible)) for rule in (VAGUE, CITATION)):  # tokenizing costs the most
        texts += comment_texts(source)
    found += [(line, finding) for line, text in texts for finding in text_findings(text)]
    return [f"{line}: {finding}" for line, finding in sorted(found, key=lambda item: item[0])]


def yaml_findings(source: str) -> list[str]:
    comments = [(number, YAML_COMMENT.search(line)) for number, line in enumerate(source.splitlines(), 1)]
    return [f"{line}: {finding}" for line, comment in comments if comment for finding in text_findings(comment.group(1))]


def text_findings(text: str) -> list[str]:
    text = CODE.sub("``", text)
    return [" ".join(match.group().split()) for rule in (VAGUE, CITATION) for match in rule.finditer(text)]


def summary_findings(tree: ast.Module, source: str, module: str) -> Iterator[tuple[int, str]]:
    if source.strip() and not module.startswith("_") and ast.get_docstring(tree) is None:
        yield 1, "module without docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").split("\n")
            line = getattr(node, "lineno", 1) + (not isinstance(node, ast.Module))
            if len(lines) > 1 and lines[1].strip():
                yield line, "summary is longer than one line"
            elif len(lines[0].split()) > MAX_SUMMARY_WORDS:
                yield line, f"summary is longer than {MAX_SUMMARY_WORDS} words"


def string_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string literal that holds more than one word."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
        if is_text and node.value not in STORED:
            yield node.lineno, node.value


def docstring_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings, those of assignments among them. Other strings of a test are its data."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def comment_texts(source: str) -> Iterator[tuple[int, str]]:
    """Every comment; those of adjacent lines as one text."""
    comments = [
        (token.start[0], token.string.lstrip("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    start, last, text = 0, -1, ""
    for line, comment in comments:
        if line != last + 1 and text:
            yield start, text
            text = ""
        start = start if text else line
        last, text = line, text + " " + comment
    if text:
        yield start, text
