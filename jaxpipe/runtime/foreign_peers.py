"""Who is connected to the ports of this process and belongs to no process of the run. Linux only; imports no JAX.

JAX's transfer server has no authentication: an idle connection to it may hold up a step for good, so a step that does not end
names what is connected.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")
_LISTENS, _CONNECTED = "0A", "01"
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class _Socket:
    state: str
    own: tuple[str, int]
    other: tuple[str, int]
    inode: str


def foreign_peers(addresses: Collection[str], pids: Collection[int], proc: Path = _PROC) -> list[str]:
    """Addresses with ports that are connected to a port where this process listens.

    Args:
        addresses: of all processes of the run.
        pids: of those on this host, with this one. A connection within this host is told by the process at its other end.
    """
    with suppress(OSError, ValueError, IndexError):
        sockets = [socket for table in _TABLES for socket in _read(proc / table)]
        mine = _inodes(proc, "self")
        ours = mine.union(*(_inodes(proc, str(pid)) for pid in pids))
        ports = {socket.own[1] for socket in sockets if socket.state == _LISTENS and socket.inode in mine}
        by_end = {(socket.own, socket.other): socket.inode for socket in sockets}
        found = []
        for socket in sockets:
            if socket.state != _CONNECTED or socket.inode not in mine or socket.own[1] not in ports:
                continue
            other_end = by_end.get((socket.other, socket.own))  # only where it is on this host
            known = socket.other[0] in addresses if other_end is None else other_end in ours
            if not known:
                found.append("{}:{}".format(*socket.other))
        return sorted(found)
    return []


def words_of(addresses: Collection[str]) -> str:
    """The foreign peers in words; nothing if there are none."""
    few = ", ".join(list(addresses)[:_MOST_NAMED])
    return few + (f" and {len(addresses) - _MOST_NAMED} more" if len(addresses) > _MOST_NAMED else "")


def _inodes(proc: Path, process: str) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    inodes = set()
    with suppress(OSError):
        for descriptor in (proc / process / "fd").iterdir():
            with suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _read(table: Path) -> Iterator[_Socket]:
    with suppress(FileNotFoundError):
        for row in table.read_text().splitlines()[1:]:
            values = row.split()
            yield _Socket(values[3], _end(values[1]), _end(values[2]), values[9])


def _end(text: str) -> tuple[str, int]:
    """Address and port of ``0100007F:F1E2``: words of four bytes in the order of the machine."""
    number, port = text.split(":")
    raw = b"".join(bytes.fromhex(number[i : i + 8])[::-1] for i in range(0, len(number), 8))
    address = ipaddress.ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)
