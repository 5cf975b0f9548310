"""On whose behalf a command runs."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Caller", "caller"]

NOBODY = 65534


class Caller(NamedTuple):
    """Ids. `uid`, `gid`: whose rights open files; `drop_uid`, `drop_gid`: what the unprivileged processes become."""

    uid: int
    gid: int
    drop_uid: int
    drop_gid: int


def caller() -> Caller:
    """Under sudo the person who called it; as plain root nobody; else the user."""
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        return Caller(uid, gid, uid, gid)
    sudo_uid, sudo_gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if sudo_uid.isdigit() and sudo_gid.isdigit() and int(sudo_uid) > 0:
        return Caller(int(sudo_uid), int(sudo_gid), int(sudo_uid), int(sudo_gid))
    return Caller(uid, gid, NOBODY, NOBODY)
