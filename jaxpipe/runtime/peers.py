"""Which processes make up a run, at which addresses they reach each other, and who else is connected to them. Imports no JAX.

**Which.** :func:`find_peers` looks in this order: flags; ``JAXPIPE_COORDINATOR`` (or ``JAX_COORDINATOR_ADDRESS``),
``JAXPIPE_PROCESSES`` and ``JAXPIPE_PROCESS``; the variables of torchrun, of a Slurm step, of a Kubernetes Job with completion
indices, of Open MPI. The address of process 0, and the number of processes, may be set in ``JAXPIPE_…`` and the rest by a
launcher. Without any there is one process. Half a set is a mistake: a process that takes itself for the only one would train a
copy of the run.

**At which address.** The name of a host does not tell: it is often 127.0.1.1 in its /etc/hosts (Debian and Ubuntu install it
so). The connections that the processes already have to process 0 do. Process 0 takes its end of one that came from another
host; a process on its host has the same address; any other takes its own end. ``JAXPIPE_INTERFACE`` sets it where hosts have
several networks: the name of an interface, or an address.

**Who else.** JAX's transfer server has no authentication: an idle connection to it may hold up a step for good, so the message
about a step that does not end names what is connected (:func:`foreign_peers`, Linux only).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import ConfigError

_FIRST_PORT, _PORTS = 61440, 4000
"""Above those that Linux gives out by itself; Slurm's and Open MPI's jobs choose one by their number."""
_LONGEST_HOST = 255
_ADDRESS = re.compile(r"\[?([^\s\[\]]+?)\]?:([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Peers:
    """``number`` processes of which this is ``mine``, from 0; process 0 listens at ``host:port``. ``local``: this process's
    number among those of its host, and how many these are: they share its devices."""

    host: str
    port: int
    number: int
    mine: int
    local: tuple[int, int] = (0, 1)

    def at(self, port: int) -> str:
        """Return the address of a port of process 0's."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def address(self) -> str:
        return self.at(self.port)

    def device_ids(self, environ: Mapping[str, str] = os.environ) -> list[int] | None:
        """Return the GPUs of this process where several processes of a host share them. None: all that it sees, because it is
        the only one there, sees no more than its own, or ``JAX_LOCAL_DEVICE_IDS`` says which."""
        index, count = self.local
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        # Counted without JAX, which is to be told its devices before it looks for them.
        gpus = Path("/dev").glob("nvidia[0-9]*") if visible is None else filter(None, visible.split(","))
        num_gpus = len(list(gpus))
        if count == 1 or num_gpus < count or "JAX_LOCAL_DEVICE_IDS" in environ:
            return None
        return list(range(index * num_gpus // count, (index + 1) * num_gpus // count))


@dataclass(frozen=True, slots=True)
class _Setting:
    """The run as one source names it: the address, the number of processes and this one's, as written (empty: not set), what
    each is called there, and the place among the processes of a host."""

    values: tuple[str, ...]
    names: tuple[str, ...]
    local: tuple[int, int] = (0, 1)

    def completed(self, other: _Setting) -> _Setting:
        """Fill what is not set here with what the ``other`` sets."""
        entries = zip(self.values, self.names, other.values, other.names, strict=True)
        chosen = [(value, name) if value else (fallback, called) for value, name, fallback, called in entries]
        return _Setting(tuple(value for value, _ in chosen), tuple(name for _, name in chosen), other.local)

    def peers(self) -> Peers | None:
        """Read the values; None if there is one process.

        Raises:
            ConfigError: something is missing, or can't be.
        """
        if missing := [name for value, name in zip(self.values, self.names, strict=True) if not value]:
            present = [name for value, name in zip(self.values, self.names, strict=True) if value]
            raise ConfigError(
                f"{_listed(present)} given, {_listed(missing)} not: several processes need all of them, one process none"
            )
        (address, *counts), (where, number_name, mine_name) = self.values, self.names
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ConfigError(f"{where} is {address!r}; want HOST:PORT of process 0, such as node-1:61440")
        number, mine = (_whole_number(text, name) for text, name in zip(counts, (number_name, mine_name), strict=True))
        if not 0 <= mine < number:
            raise ConfigError(
                f"{mine_name} is {mine} and {number_name} {number}; processes are numbered from 0 to one less"
            )
        return Peers(match[1], int(match[2]), number, mine, self.local) if number > 1 else None


def find_peers(flags: Sequence[object | None], environ: Mapping[str, str] = os.environ) -> Peers | None:
    """Return the run that this process belongs to, or None if it is the only one. ``flags``: of ``--coordinator``,
    ``--processes`` and ``--process``, None where not given.

    Raises:
        ConfigError: half a set was given, or one that can't be.
    """
    values = tuple("" if flag is None else str(flag) for flag in flags)
    if any(values):
        return _Setting(values, ("--coordinator", "--processes", "--process")).peers()
    address = "JAXPIPE_COORDINATOR" if environ.get("JAXPIPE_COORDINATOR") else "JAX_COORDINATOR_ADDRESS"
    ours = _setting(environ, (address, "JAXPIPE_PROCESSES", "JAXPIPE_PROCESS"), "JAXPIPE_LOCAL_PROCESS")
    # JAXPIPE_PROCESSES=1 by itself means one process, whatever variables a launcher has left in the environment.
    if ours.values == ("", "1", ""):
        return None
    # Without this process's number only a launcher can know it. torchrun first: it may run inside a Slurm step, whose variables
    # then count torchrun's agents and not its workers.
    if not ours.values[2]:
        for launcher in (_torchrun, _slurm, _kubernetes, _open_mpi):
            if any((setting := launcher(environ)).values):
                return ours.completed(setting).peers()
    return ours.peers() if any(ours.values) else None


def _setting(environ: Mapping[str, str], names: tuple[str, ...], local: str = "", of: str = "") -> _Setting:
    """Read these variables. ``local``, ``of``: the variables of the place on the host."""
    place = environ.get(local, ""), environ.get(of or f"{local}ES", "")
    both = all(place)
    return _Setting(
        tuple(environ.get(name, "") for name in names),
        names,
        (_whole_number(place[0], local), _whole_number(place[1], of or f"{local}ES")) if both else (0, 1),
    )


def _torchrun(environ: Mapping[str, str]) -> _Setting:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    # With an agent store, torchrun itself listens at MASTER_PORT.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal():
        port = str(int(port) + 1)
    names = ("MASTER_ADDR and MASTER_PORT", "WORLD_SIZE", "RANK")
    address = {names[0]: f"{host}:{port}"} if host and port else {}
    return _setting({**environ, **address}, names, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _slurm(environ: Mapping[str, str]) -> _Setting:
    """Read a Slurm step's variables: those of the job are set for a batch script and a shell, too."""
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    nodes = environ.get(names[0], "")
    if not nodes:
        return _Setting(("", "", ""), names)
    job, step = (_whole_number(environ.get(name, "0"), name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2),3
    tasks = [count for count, times in entries for _ in range(int(times or 1))]
    node_tasks = dict(enumerate(tasks)).get(_whole_number(environ.get("SLURM_NODEID", "0"), "SLURM_NODEID"), "")
    # Two ports a step: JAX's service takes the one after ours. Steps of one job, and jobs that share a node, differ in theirs.
    address = f"{_first_host(nodes)}:{_FIRST_PORT + (10 * job + 2 * step) % _PORTS}"
    variables = {**environ, names[0]: address, "tasks of the node": node_tasks}
    return _setting(variables, names, "SLURM_LOCALID", "tasks of the node")


def _first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm's: ``rack1-node04`` of ``rack[1-2]-node[04-07,11],other``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _kubernetes(environ: Mapping[str, str]) -> _Setting:
    return _setting(environ, ("JAXPIPE_COORDINATOR", "JAXPIPE_PROCESSES", "JOB_COMPLETION_INDEX"))


def _open_mpi(environ: Mapping[str, str]) -> _Setting:
    """Read Open MPI's variables; the address is that of mpirun's host, where process 0 usually is. Newer versions have none."""
    names = ("JAXPIPE_COORDINATOR", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    match = re.match(r"(\d+).*?;tcp6?://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    port = _FIRST_PORT + 2 * (int(match[1]) >> 16) % _PORTS if match else 0
    address = {names[0]: f"{match[2]}:{port}"} if match else {}
    return _setting({**environ, **address}, names, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _whole_number(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise ConfigError(f"{name} is {text!r}; want a whole number")
    return int(text)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


SETTING = "JAXPIPE_INTERFACE"
_SIOCGIFADDR = 0x8915


def address_from_setting(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the address that the setting names, or ""; and what is wrong with it, or ""."""
    setting = environ.get(SETTING, "")
    try:
        return address_of(setting) if setting else "", ""
    except ValueError as error:
        return "", f"{SETTING} is {setting!r}: {error}"


def address_of_first(ends: Collection[tuple[str, str]]) -> str:
    """Return the address of process 0. ``ends``: of its connections, the local and the remote one."""
    reached_from_afar = [local for local, remote in ends if not same_host(local, remote)]
    return next(iter(reached_from_afar or [local for local, _ in ends]))


def unreachable(address: str, several_hosts: bool) -> str:
    """Say why the other processes can't reach one at ``address``, and what to do; "" if they can."""
    if not (several_hosts and ipaddress.ip_address(address).is_loopback) and "%" not in address:
        return ""
    return (
        f"would be reached at {address}, which is an address within one {'link' if '%' in address else 'host'}, and there are "
        f"several hosts: set {SETTING} in all processes to the interface between them, or --coordinator to an address of it"
    )


def address_of(setting: str) -> str:
    """Return the address that the setting means: of an interface of this name, or itself.

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


def plain_address(address: str | bytes) -> str:
    """Return an address as people write it: the IPv4 one where IPv6 has wrapped one."""
    number = ipaddress.ip_address(address)
    return str(getattr(number, "ipv4_mapped", None) or number)


def own_host() -> str:
    """Return the name of this host, as messages show it."""
    return printable(socket.gethostname())[:_LONGEST_HOST] or "without a name"


def is_host(name: object) -> bool:
    """Return whether another process may call its host so."""
    return isinstance(name, str) and 0 < len(name) <= _LONGEST_HOST and name.isprintable()


def printable(text: str) -> str:
    """Replace by a ? what could move a terminal's cursor, or is no character."""
    return "".join(c if c.isprintable() else "?" for c in text)


def same_host(local: str, remote: str) -> bool:
    """Return whether a connection between these addresses is within a host."""
    return local == remote or all(ipaddress.ip_address(end).is_loopback for end in (local, remote))


_PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")
_LISTENS, _CONNECTED = "0A", "01"
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class _Socket:
    state: str
    local: tuple[str, int]
    remote: tuple[str, int]
    inode: str


def foreign_peers(addresses: Collection[str], pids: Collection[int], proc: Path = _PROC) -> list[str]:
    """Return addresses with ports that are connected to a port where this process listens, and belong to no process of the run.

    Args:
        addresses: of all processes of the run.
        pids: of those on this host, with this one.
    """
    with suppress(OSError, ValueError, IndexError):
        sockets = [entry for table in _TABLES for entry in _read(proc / table)]
        mine = _inodes(proc, "self")
        ours = mine.union(*(_inodes(proc, str(pid)) for pid in pids))
        ports = {entry.local[1] for entry in sockets if entry.state == _LISTENS and entry.inode in mine}
        by_end = {(entry.local, entry.remote): entry.inode for entry in sockets}
        strangers = []
        for entry in sockets:
            if entry.state != _CONNECTED or entry.inode not in mine or entry.local[1] not in ports:
                continue
            # The other end is in the table only where it is on this host. There the process that holds it decides: another
            # user's program has the same address as ours.
            other_end = by_end.get((entry.remote, entry.local))
            is_ours = entry.remote[0] in addresses if other_end is None else other_end in ours
            if not is_ours:
                strangers.append("{}:{}".format(*entry.remote))
        return sorted(strangers)
    return []


def words_of(addresses: Collection[str]) -> str:
    """List foreign peers in words; "" if there are none."""
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
    """Read address and port from ``0100007F:F1E2``: words of four bytes in the order of the machine."""
    number, port = text.split(":")
    raw = b"".join(bytes.fromhex(number[i : i + 8])[::-1] for i in range(0, len(number), 8))
    return plain_address(raw), int(port, 16)
