"""Stored and published names never disappear or change; new ones may be added.

A failure names the missing one, and what holds it. Where the source spells a name in another form (in parts, say), change
how `tests/support/live_names.py` finds it, never the frozen name.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from hanzo_ml.client.run import Run
from recipes.training.objectives import Objective
from tests.support import live_names, stable_names
from tests.support.live_interfaces import Interfaces, read_interfaces
from tests.support.live_names import Groups


@pytest.fixture(scope="module")
def interfaces(tmp_path_factory: pytest.TempPathFactory) -> Interfaces:
    return read_interfaces(tmp_path_factory.mktemp("interfaces"))


def lost(frozen: Any, live: Any) -> list[str]:
    """List the names of a frozen group that are missing or have another value."""
    if not isinstance(frozen, dict):
        return sorted({*frozen} - {*live})
    gone = [f"{key} (all of it)" for key in frozen if key not in live]
    parts = {
        key: sorted({*value} - {*live[key]}) for key, value in frozen.items() if key in live and not isinstance(value, str)
    }
    changed = [f"{key}: {', '.join(map(str, names))}" for key, names in parts.items() if names]
    other = [f"{key}: was {value}, is {live[key]}" for key, value in frozen.items() if value_differs(value, live.get(key))]
    return [*gone, *changed, *other]


def value_differs(frozen: Any, live: Any) -> bool:
    return isinstance(frozen, str) and live is not None and frozen != live


def check(group: str, live: Any) -> None:
    gone = lost(getattr(stable_names, group), live)
    assert not gone, f"{stable_names.WHERE[group]} Gone or changed: {'; '.join(gone)}"


def check_signatures(group: str, live: Mapping[str, str]) -> None:
    """Compare signatures; more parameters at the end are allowed."""
    frozen: dict[str, str] = getattr(stable_names, group)
    as_before = {
        name: frozen[name] for name, now in live.items() if name in frozen and now.startswith(frozen[name].rstrip(")"))
    }
    check(group, {**live, **as_before})


@pytest.mark.parametrize(
    ("group", "read"),
    [
        ("OPERATIONS", lambda found: live_names.operations(found.document)),
        ("SCHEMAS", lambda found: live_names.schemas(found.document)),
        ("SCHEMA_VALUES", lambda found: live_names.schema_values(found.document)),
        ("TABLES", lambda found: found.tables),
        ("SETTINGS", lambda found: found.settings),
        ("PROMETHEUS", lambda found: found.prometheus),
    ],
)
def test_server_keeps_its_interfaces(interfaces: Interfaces, group: str, read: Callable[[Interfaces], Any]) -> None:
    check(group, read(interfaces))


def test_commands_keep_their_names_and_options() -> None:
    check("COMMANDS", live_names.commands())


def test_migrations_keep_their_revisions() -> None:
    check("MIGRATIONS", live_names.migrations())


@pytest.mark.parametrize("group", ["ASSETS", "CHECKS", "SENSORS", "PARTITIONS", "POOLS", "GROUPS"])
def test_dagster_knows_everything_by_its_old_name(group: str) -> None:
    check(group, getattr(graph(), group.lower()))


@cache
def graph() -> live_names.Graph:
    return live_names.graph()


@pytest.mark.parametrize(
    "group",
    ["ENVIRONMENT", "TAGS", "RUN_METRICS", "HEADERS", "FILES", "RUN_KEYS", "IDENTIFIERS", "ENTRY_POINT_GROUPS"],
)
def test_literals_are_still_in_the_source(group: str) -> None:
    check(group, live_names.source().literals)


def test_events_are_still_written_by_their_names() -> None:
    """A name may be composed, such as `job.` and the kind of an incident."""
    literals = live_names.source().literals
    kinds = {event: event.partition(".") for event in stable_names.EVENTS}
    check(
        "EVENTS",
        [event for event, (topic, _, kind) in kinds.items() if event in literals or {f"{topic}.", kind} <= literals],
    )


def test_stored_values_are_still_declared_together() -> None:
    declared = live_names.source().values
    kept = {
        name: values for name, values in stable_names.STORED_VALUES.items() if any({*values} <= each for each in declared)
    }
    check("STORED_VALUES", kept)


def test_documents_keep_their_keys() -> None:
    """Under any class name: one class declares all keys of the document."""
    check("DOCUMENTS", {name: closest(name, keys) for name, keys in stable_names.DOCUMENTS.items()})


def closest(document: str, keys: tuple[str, ...]) -> frozenset[str]:
    """Return the fields of the class that shares most keys with a document.

    Among several, it is the one with the document's name.
    """
    name = document.partition(" ")[0]
    _, fields = max(live_names.source().fields, key=lambda each: (len(each[1] & {*keys}), each[0] == name))
    return fields


def test_exit_codes_are_still_declared() -> None:
    assert {*stable_names.EXIT_CODES.values()} <= live_names.source().numbers, stable_names.WHERE["EXIT_CODES"]


def test_training_scripts_call_the_same_functions() -> None:
    check_signatures("PYTHON_API", live_names.python_api())
    check_signatures("RUN", live_names.members_of(Run))


def test_users_objectives_derive_from_the_same_class() -> None:
    check_signatures("OBJECTIVE", live_names.members_of(Objective))


def test_addresses_in_stored_files_can_be_imported() -> None:
    check("IMPORTS", [address for address in stable_names.IMPORTS if live_names.resolves(address)])


def test_programs_can_be_started_by_their_old_names() -> None:
    check("PROGRAMS", [module for module in stable_names.PROGRAMS if live_names.is_program(module)])
    check("CONSOLE_SCRIPTS", live_names.console_scripts())


@pytest.mark.parametrize(
    ("frozen", "live", "expected"),
    [
        (("a", "b"), ("b", "c"), ["a"]),
        ({"jobs": ("id", "reason")}, {"jobs": ("id", "cause"), "new": ()}, ["jobs: reason"]),
        ({"jobs": ("id",)}, {}, ["jobs (all of it)"]),
        ({"read": "GET /a"}, {"read": "GET /b"}, ["read: was GET /a, is GET /b"]),
        ({"read": "GET /a", "list": ("x",)}, {"read": "GET /a", "list": ("x", "y")}, []),
    ],
)
def test_lost_names_are_reported_and_new_ones_are_not(frozen: Any, live: Groups, expected: list[str]) -> None:
    assert lost(frozen, live) == expected
