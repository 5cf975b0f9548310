"""Which processes a daemon traces."""

from __future__ import annotations

import os
from typing import Any

import pytest

from stallscope.capture import admission as module
from stallscope.capture.admission import Admission, Rule, cgroup_of
from stallscope.capture.procfs import Facts

ID = "ab" * 32


def facts(**given: Any) -> Facts:
    """A process."""
    plain = Facts(77, 77, 1, "python", ["/usr/bin/python3", "train.py", "--lr", "1"], None, 0, 1000)
    return plain._replace(**given)


@pytest.mark.parametrize(
    ("rule", "given", "fits"),
    [
        ({"user": "1000"}, {}, True),
        ({"user": "1001"}, {}, False),
        ({"user": "root"}, {"uid": 0}, True),
        ({"command": "*train.py*"}, {}, True),
        ({"command": "python3"}, {}, True),
        ({"command": "python"}, {}, True),
        ({"command": "train.py"}, {}, False),
        ({"container": "none"}, {}, True),
        ({"container": "*"}, {}, False),
        ({"container": "abab"}, {"container_id": ID}, True),
        ({"container": "none"}, {"container_id": ID}, False),
        ({"container": "*"}, {"container_id": ID}, True),
        ({"cgroup": "/jobs/*"}, {}, True),
        ({"cgroup": "/system.slice/*"}, {}, False),
        ({"user": "1000", "command": "*serve*"}, {}, False),
        ({}, {}, True),
    ],
)
def test_a_rule_means_all_that_it_names(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, str], given: dict[str, Any], fits: bool
) -> None:
    """Each thing that a rule can name."""
    monkeypatch.setattr(module, "cgroup_of", lambda pid: "/jobs/42/task")
    assert Rule.of(rule).fits(facts(**given), lambda: module.cgroup_of(77)) is fits


def test_deny_wins_and_allow_is_a_list() -> None:
    """Without rules everybody is traced."""
    alice, bob = Rule(user=1000), Rule(user=1001)
    assert Admission().why_not(facts()) is None
    assert Admission(allow=[alice, bob]).why_not(facts()) is None
    assert Admission(allow=[bob]).why_not(facts()) == "no allow rule is met"
    assert Admission(allow=[alice], deny=[Rule(user=1000, command="*train*")]).why_not(facts()) == (
        "deny user=1000 command=*train*"
    )


def test_an_unknown_user_is_an_error() -> None:
    """Not a rule that is never met."""
    with pytest.raises(KeyError):
        Rule.of({"user": "nobody-of-that-name"})


def test_the_cgroup_of_a_process() -> None:
    """Its path, whatever hierarchies there are."""
    assert cgroup_of(os.getpid()).startswith("/")
    assert cgroup_of(1 << 22) == ""
