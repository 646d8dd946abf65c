"""Namespaces of organizations: safe names that no two organizations share."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.compute.kubernetes.namespaces import organization_namespace
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.schemas import LABEL

OWN = Scheduler(namespace_per_organization=True)


def namespace_of(organization: str) -> str:
    return organization_namespace(OWN, organization)


def test_organizations_share_the_namespace_unless_the_settings_say_otherwise() -> None:
    assert organization_namespace(Scheduler(), "acme") == "hanzo-ml"
    assert (namespace_of("default"), namespace_of("acme"), namespace_of("a-1")) == (
        "hanzo-ml",
        "hanzo-ml-acme",
        "hanzo-ml-a-1",
    )


@pytest.mark.parametrize("organization", ["Acme", "acme inc.", "-", "a" * 200, "Ä", "acme-", "a/b", ""])
def test_id_that_is_an_invalid_label_gets_a_short_form_and_a_hash(organization: str) -> None:
    found = namespace_of(organization)
    digest = hashlib.sha256(organization.encode()).hexdigest()[:16]
    assert LABEL.fullmatch(found) and found.startswith("hanzo-ml-") and found.endswith(f"-{digest}")


def test_organization_cannot_be_named_after_the_namespace_of_another() -> None:
    victim = namespace_of("Acme Inc")
    attacker = victim.removeprefix("hanzo-ml-")
    assert LABEL.fullmatch(attacker) and namespace_of(attacker) != victim
    hidden = namespace_of("Ä").removeprefix("hanzo-ml-")
    assert namespace_of(hidden) != namespace_of("Ä")


@given(st.lists(st.text(alphabet="aAbB1-_. ", max_size=70), unique=True, min_size=2, max_size=20))
def test_no_two_organizations_share_a_namespace(organizations: list[str]) -> None:
    found = [namespace_of(organization) for organization in organizations]
    assert len({*found}) == len(organizations) and all(LABEL.fullmatch(each) for each in found)


def test_namespace_that_leaves_no_room_for_organizations_is_refused() -> None:
    with pytest.raises(ValueError, match="use at most 40"):
        Scheduler(namespace="n" * 41, namespace_per_organization=True)
    longest = Scheduler(namespace="n" * 40, namespace_per_organization=True)
    assert LABEL.fullmatch(organization_namespace(longest, "Some Organization Of A Long Name"))
