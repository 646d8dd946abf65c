"""docs/specification.md: markers name existing requirements, and tests are listed with their suite."""

import re

from docs.specification import (
    REQUIREMENTS,
    TESTS,
    find_guarding_tests,
    read_guarding_tests,
    read_requirements,
    render_specification,
)
from recipes.contracts.yaml_reader import find_repeated_key

MODULE = '''
"""A module."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requirement("A1")]


@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.cluster
@pytest.mark.requirement("B2", "C3")
def test_first(x: int) -> None:
    """It says `pytest.mark.requirement("D4")`."""


def test_second() -> None: ...
'''


def test_markers_name_known_requirements() -> None:
    known = {number for section in read_requirements().values() for number in section}
    unknown = {
        f"{test.node}: {number}"
        for test in read_guarding_tests(TESTS)
        for number in test.requirements
        if number not in known
    }
    assert not unknown, f"not in docs/requirements.yaml: {sorted(unknown)}"


def test_no_requirement_is_listed_twice() -> None:
    numbers = [number for section in read_requirements().values() for number in section]
    assert len(numbers) == len(set(numbers))
    assert find_repeated_key(REQUIREMENTS.read_text(encoding="utf-8")) is None
    assert all(re.fullmatch(r"[A-Z]\d+", number) for number in numbers)


def test_markers_of_modules_and_functions_are_read() -> None:
    found = [(test.node, test.suite, test.requirements) for test in find_guarding_tests(MODULE, "tests/test_a.py")]
    assert found == [
        ("tests/test_a.py", "slow", ("A1",)),
        ("tests/test_a.py::test_first", "cluster", ("B2", "C3")),
    ]
    assert not list(find_guarding_tests("import pytest\n\ndef test_a() -> None: ...\n", "tests/test_b.py"))


def test_page_lists_requirements_with_and_without_tests() -> None:
    page = render_specification()
    [alive] = re.findall(r"^\| V1 \|.*$", page, re.MULTILINE)
    node = "tests/api/test_health.py::test_alive_ready_health_version"
    assert f"[`{node}`](../tests/api/test_health.py) (fast)" in alive
    lines = re.findall(r"^\| [A-Z]\d+ \|.*$", page, re.MULTILINE)
    without = [line for line in lines if line.endswith("| no test |")]
    assert f"{len(lines) - len(without)} of {len(lines)} requirements have a test" in page
