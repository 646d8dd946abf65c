"""Make docs/specification.md from requirements.yaml and the tests' markers, which are read without importing a test."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from docs.markdown_table import render_table

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent / "tests"
REQUIREMENTS = FOLDER / "requirements.yaml"
MARKER = "requirement"
SUITES = {
    "fast": "make test",
    "slow": "make test-slow",
    "long": "make test-long",
    "cluster": "make test-cluster",
    "cluster_slow": "make test-cluster-slow",
    "install_slow": "make test-install-slow",
    "gpu": "make test-gpu",
}
"""Marker of each suite, and what runs it. Of several markers the last one here decides."""
EXAMPLE = "W6"
HEADER = """# Specification

This page is made from `docs/requirements.yaml` and the tests' markers (`make docs`).

It lists what Hanzo ML has to do, and the tests that guard each requirement or a part of it.
{guarded} of {total} requirements have a test. Where the table says "no test", nothing guards the requirement, and it may
not be met. A test names its requirements with the marker `@pytest.mark.requirement("V1", "V7")`.

To run the tests of one requirement, pass its test names to pytest. For {example}:

```console
$ python -m pytest -q {command}
```

The word after a name is the suite of the test:
"""


@dataclass(frozen=True)
class GuardingTest:
    """A test, or a whole module of tests, that carries the marker."""

    path: str
    """Of the file, in the repository."""
    function: str | None
    suite: str
    requirements: tuple[str, ...]

    @property
    def node(self) -> str:
        """Its name for pytest."""
        return f"{self.path}::{self.function}" if self.function else self.path

    @property
    def link(self) -> str:
        return f"[`{self.node}`](../{self.path}) ({self.suite})"


def render_specification() -> str:
    sections, tests = read_requirements(), group_by_requirement(read_guarding_tests(TESTS))
    total = sum(map(len, sections.values()))
    guarded = sum(number in tests for section in sections.values() for number in section)
    command = " ".join(test.node for test in tests[EXAMPLE])
    suites = render_table(("suite", "run it with"), [(name, f"`{command}`") for name, command in SUITES.items()])
    parts = [HEADER.format(guarded=guarded, total=total, example=EXAMPLE, command=command), suites]
    for title, requirements in sections.items():
        rows = [
            (number, sentence, "<br>".join(test.link for test in tests.get(number, ())) or "no test")
            for number, sentence in requirements.items()
        ]
        parts += [f"## {title}", render_table(("#", "requirement", "tests"), rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def read_requirements() -> dict[str, dict[str, str]]:
    """Sentences of the requirements by number, in their sections."""
    found: dict[str, dict[str, str]] = yaml.safe_load(REQUIREMENTS.read_text(encoding="utf-8"))
    return found


def group_by_requirement(tests: Iterable[GuardingTest]) -> Mapping[str, list[GuardingTest]]:
    """Tests by requirement, those of the fastest suite first."""
    found: defaultdict[str, list[GuardingTest]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (list(SUITES).index(test.suite), test.node)):
        for number in test.requirements:
            found[number].append(test)
    return dict(found)


def read_guarding_tests(folder: Path) -> Iterator[GuardingTest]:
    for file in sorted(folder.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if f"mark.{MARKER}(" in source:  # parsing all files would cost seconds
            yield from find_guarding_tests(source, f"{folder.name}/{file.relative_to(folder).as_posix()}")


def find_guarding_tests(source: str, path: str) -> Iterator[GuardingTest]:
    """Read the markers of a module (`pytestmark`) and those of its functions, which have the module's suite."""
    tree = ast.parse(source)
    module_marks = [
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    ]
    if numbers := collect_requirements(module_marks):
        yield GuardingTest(path, None, choose_suite(module_marks), numbers)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            numbers := collect_requirements(node.decorator_list)
        ):
            yield GuardingTest(path, node.name, choose_suite([*module_marks, *node.decorator_list]), numbers)


def collect_requirements(marks: Iterable[ast.expr]) -> tuple[str, ...]:
    return tuple(
        str(ast.literal_eval(number))
        for mark in marks
        if isinstance(mark, ast.Call) and name_mark(mark) == MARKER
        for number in mark.args
    )


def choose_suite(marks: Iterable[ast.expr]) -> str:
    names = {name_mark(mark) for mark in marks}
    return [suite for suite in SUITES if suite in names or suite == "fast"][-1]


def name_mark(mark: ast.expr) -> str:
    """Name of `pytest.mark.NAME` or `pytest.mark.NAME(...)`."""
    found = re.match(r"pytest\.mark\.(\w+)", ast.unparse(mark))
    return found[1] if found else ""
