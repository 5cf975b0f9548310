"""Which processes a daemon traces: rules about user, cgroup, container and command line.

A rule is met when all that it names is: a process is traced if no deny rule is met, and one of the allow rules is or
there are none. Asked when a process is found; its children are traced with it.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from stallscope.capture.procfs import Facts
from stallscope.capture.rights import read_text

__all__ = ["Admission", "Rule", "cgroup_of"]

MAX_CGROUP = 4096


class Rule(NamedTuple):
    """Patterns as the shell has them (* ? [..]); None where the rule does not ask. `user`: a number.

    `container` is compared with the container's id, as far as the rule gives it; `command` with the command line, words
    with one space between, and with the name of its program.
    """

    user: int | None = None
    cgroup: str | None = None
    container: str | None = None
    command: str | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> Rule:
        """From a table of the configuration. Raises LookupError for a user that there is not."""
        user = row.get("user")
        return cls(None if user is None else _uid(user), row.get("cgroup"), row.get("container"), row.get("command"))

    def __str__(self) -> str:
        given = ((name, value) for name, value in self._asdict().items() if value is not None)
        return " ".join(f"{name}={value}" for name, value in given) or "everything"

    def fits(self, facts: Facts, cgroup: Callable[[], str]) -> bool:
        """Whether the process is meant."""
        if self.user is not None and self.user != facts.uid:
            return False
        if self.container is not None and not _is_container(self.container, facts.container_id):
            return False
        if self.command is not None and not any(fnmatchcase(words, self.command) for words in _commands(facts)):
            return False
        return self.cgroup is None or fnmatchcase(cgroup(), self.cgroup)


def _uid(user: str) -> int:
    return int(user) if re.fullmatch(r"[0-9]{1,10}", user) else pwd.getpwnam(user).pw_uid


def _is_container(pattern: str, container: str | None) -> bool:
    if container is None:
        return pattern == "none"
    return fnmatchcase(container, pattern if "*" in pattern else f"{pattern}*")


def _commands(facts: Facts) -> list[str]:
    program = facts.cmdline[0].rpartition("/")[2] if facts.cmdline else facts.name
    return [" ".join(facts.cmdline), program, facts.name]


def cgroup_of(pid: int) -> str:
    """Its path in the unified hierarchy, else in the first one that has more than "/"; "" where it can't be read."""
    lines = (read_text(f"/proc/{pid}/cgroup") or "")[:MAX_CGROUP].splitlines()
    paths = [line.split(":", 2)[2] for line in lines if line.count(":") >= 2]
    unified = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    return next((path for path in unified + paths if path != "/"), "/" if paths else "")


class Admission:
    """The rules, and how many processes each kept out.

    Attributes:
        denied: by rule.
    """

    def __init__(self, allow: Sequence[Rule] = (), deny: Sequence[Rule] = ()) -> None:
        self.allow, self.deny = tuple(allow), tuple(deny)
        self.denied: dict[str, int] = {}

    def why_not(self, facts: Facts) -> str | None:
        """The reason why a process is not to be traced; None where it is."""
        known: list[str] = []

        def cgroup() -> str:
            if not known:
                known.append(cgroup_of(facts.pid))
            return known[0]

        met = next((rule for rule in self.deny if rule.fits(facts, cgroup)), None)
        if met is not None:
            return f"deny {met}"
        if self.allow and not any(rule.fits(facts, cgroup) for rule in self.allow):
            return "no allow rule is met"
        return None

    def count(self, why: str) -> None:
        """One process was kept out."""
        self.denied[why] = self.denied.get(why, 0) + 1
