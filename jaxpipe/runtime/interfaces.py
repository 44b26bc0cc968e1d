"""By which address the other processes of a run reach this one. Imports no JAX.

Names don't tell: the own name of a host is often 127.0.1.1 in its /etc/hosts (Debian and Ubuntu install it so). What tells is
the connections that the processes already have to process 0. Process 0 takes its end of one that came from another host; a
process on its host has the same address; any other takes its own end. ``JAXPIPE_INTERFACE`` says it where hosts have several
networks: the name of an interface, or an address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpipe.runtime.processes import Processes

SETTING = "JAXPIPE_INTERFACE"
_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"  # the scope, as it is written there


def agree_on_interface(
    processes: Processes,
    hosts: Sequence[str],
    ends: Mapping[int, tuple[str, str]],
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The address of this process. All processes call it together.

    Args:
        hosts: their names, by process.
        ends: the addresses of this and of the other end of the connection to each process that this one has.

    Raises:
        AgreedError: the setting names no interface of this host, or the others can't reach an address.
    """
    setting, wrong, chosen = environ.get(SETTING, ""), "", ""
    try:
        chosen = address_of(setting) if setting else ""
    except ValueError as error:
        wrong = f"{SETTING} is {setting!r}: {error}"
    processes.check("interface", wrong)
    if processes.mine == 0:
        elsewhere = [own for own, other in ends.values() if not _same_host(own, other)]
        own = chosen or next(iter(elsewhere or [own for own, _ in ends.values()]))
        processes.broadcast("address of process 0", own)
    else:
        first = processes.broadcast("address of process 0", "")
        mine, other = ends[0]
        own = chosen or (first if _same_host(mine, other) else mine)
    several = len(set(hosts)) > 1

    def unreachable(addresses: Sequence[str]) -> str:
        for process, address in enumerate(addresses):
            if (several and ipaddress.ip_address(address).is_loopback) or "%" in address:
                return (
                    f"{processes.who(process)} would be reached at {address}, which is an address within one "
                    f"{'network segment' if '%' in address else 'host'}, and there are several hosts: set {SETTING} in all "
                    "processes to the interface between them, or --coordinator to an address of it"
                )
        return ""

    processes.judge("addresses", own, unreachable)
    return own


def address_of(setting: str) -> str:
    """The address that the setting means: of an interface of this name, or itself.

    Raises:
        ValueError: this host has no such interface or address.
    """
    try:
        address = ipaddress.ip_address(setting)
    except ValueError:
        return _address_of_interface(setting)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((setting, 0))
    except OSError:
        raise ValueError("this host has no such address") from None
    if address.is_unspecified:
        raise ValueError("want the name of an interface, or an address of this host")
    return str(address)


def _address_of_interface(name: str) -> str:
    names = [interface for _, interface in socket.if_nameindex()]
    if name not in names:
        raise ValueError(f"this host has no such interface; it has {', '.join(names)}")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for number, _, _, scope, _, interface in map(str.split, _IF_INET6.read_text().splitlines()):
            if interface == name and scope == _GLOBAL:
                return str(ipaddress.ip_address(bytes.fromhex(number)))
    raise ValueError("the interface has no address")


def _same_host(own: str, other: str) -> bool:
    """Whether a connection between these addresses is within a host."""
    return own == other or all(ipaddress.ip_address(end).is_loopback for end in (own, other))
