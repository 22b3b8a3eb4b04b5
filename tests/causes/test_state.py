"""Family 6: what is said of a cause, and its old names."""

from __future__ import annotations

import pytest

from allranks.causes.book import find_cause


@pytest.mark.parametrize("name", ["AR601", "AR602", "AR603", "AR604", "AR605", "AR606", "AR607", "AR608", "AR609"])
def test_family_6_says_what_was_found_without_values(name: str) -> None:
    cause = find_cause(name)
    assert cause.told
    assert "{" not in cause.told + cause.message


def test_the_old_names_of_the_elastic_gotchas_lead_to_their_causes() -> None:
    assert find_cause("MN5").name == "elastic-no-resume"
    assert find_cause("MN6").name == "horovod-elastic-timeout"
