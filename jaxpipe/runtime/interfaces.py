"""Finds the address by which the other processes of a run reach this one. Imports no JAX.

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
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

SETTING = "JAXPIPE_INTERFACE"
_SIOCGIFADDR = 0x8915


def said_address(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The address that the setting says, or nothing; and what is wrong with it, or nothing."""
    setting = environ.get(SETTING, "")
    try:
        return address_of(setting) if setting else "", ""
    except ValueError as error:
        return "", f"{SETTING} is {setting!r}: {error}"


def address_of_first(ends: Collection[tuple[str, str]]) -> str:
    """The address of process 0; ``ends``: of its connections, the own one and the other."""
    elsewhere = [own for own, other in ends if not same_host(own, other)]
    return next(iter(elsewhere or [own for own, _ in ends]))


def unreachable(address: str, several_hosts: bool) -> str:
    """Why the other processes can't reach one at ``address``, and what to do; empty if they can."""
    if not (several_hosts and ipaddress.ip_address(address).is_loopback) and "%" not in address:
        return ""
    return (
        f"would be reached at {address}, which is an address within one {'link' if '%' in address else 'host'}, and there are "
        f"several hosts: set {SETTING} in all processes to the interface between them, or --coordinator to an address of it"
    )


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
        for number, _, _, scope, _, interface in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            if interface == name and scope == "00":  # global
                return str(ipaddress.ip_address(bytes.fromhex(number)))
    raise ValueError("the interface has no address")


def same_host(own: str, other: str) -> bool:
    """Return whether a connection between these addresses is within a host."""
    return own == other or all(ipaddress.ip_address(end).is_loopback for end in (own, other))
