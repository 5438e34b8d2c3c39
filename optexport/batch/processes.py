"""The processes below one, as Linux tells of them, whichever session or group they have gone to."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def below(ancestor: int) -> dict[int, int]:
    """The processes that one has started, and those that these have, which are alive, and the bytes resident of each.

    One that ends while this looks may hide those below it until they are looked for again.
    """
    parents, resident = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # What follows the name, which may hold spaces: state, parent, group, session, ...
                told = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                fields = told.rpartition(")")[2].split()
                pid = int(entry.name)
                parents[pid] = int(fields[1])
                if fields[0] not in "ZX":
                    resident[pid] = int(fields[21]) * _PAGE
    return {pid: used for pid, used in resident.items() if _is_below(pid, ancestor, parents)}


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    seen = set()  # a number that is given anew while this looks may close a circle
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def used(resident: dict[int, int], limit: int) -> int:
    """Bytes resident of processes; where it seems too much, pages that several share are counted once among them."""
    if sum(resident.values()) <= limit:
        return sum(resident.values())
    shared = 0
    for pid, alone in resident.items():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            shared += next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            shared += alone
    return shared


def end(processes: Iterable[int]) -> None:
    """Ends processes at once. Each is stopped first, so that none starts others while its like are ended."""
    each = list(processes)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in each:
            tell(pid, number)


def tell(pid: int, number: int) -> None:
    """Sends a signal to a process, if it is there yet."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
