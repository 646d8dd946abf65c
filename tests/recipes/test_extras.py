"""Packages of an extra, derived from installed metadata."""

from recipes.extras import missing_packages

REQUIREMENTS = (
    "pydantic>=2",
    "not-installed-anywhere",
    'PyYAML>=6; extra == "train"',
    'no-such-torch==2.13.0; extra == "train"',
    'no-such-peft; extra == "train"',
    'no-such-engine; extra == "serve"',
    'no-such-windows-driver; sys_platform == "win32" and extra == "train"',
)


def test_only_packages_of_the_extra_that_are_not_installed_are_missing() -> None:
    assert missing_packages(REQUIREMENTS, "train") == ["no-such-torch", "no-such-peft"]
    assert missing_packages(REQUIREMENTS, "serve") == ["no-such-engine"]
    assert missing_packages(REQUIREMENTS, "ui") == []
