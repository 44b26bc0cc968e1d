"""Which processes make up a run, as flags or a launcher's variables say. Imports no JAX.

Looked for in this order: flags; ``JAXPIPE_COORDINATOR`` (or ``JAX_COORDINATOR_ADDRESS``), ``JAXPIPE_PROCESSES`` and
``JAXPIPE_PROCESS``; the variables of torchrun, of a Slurm step, of a Kubernetes Job with completion indices, of Open MPI. Where
processes meet, and how many they are, may be said in ``JAXPIPE_…`` and the rest by a launcher. Without any a process is alone.
Half a set is a mistake: a process that takes itself for the only one would train a copy of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import ConfigError

_FIRST_PORT, _PORTS = 61440, 4000
"""Above those that Linux gives out by itself; Slurm's and Open MPI's jobs choose one by their number."""
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
        """A port of process 0's."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def address(self) -> str:
        return self.at(self.port)

    def device_ids(self, environ: Mapping[str, str] = os.environ) -> list[int] | None:
        """The GPUs of this process where several processes of a host share them. None: all that it sees, because it is the
        only one there, sees no more than its own, or ``JAX_LOCAL_DEVICE_IDS`` says which."""
        index, count = self.local
        named = environ.get("CUDA_VISIBLE_DEVICES")
        found = Path("/dev").glob("nvidia[0-9]*") if named is None else filter(None, named.split(","))
        seen = len(list(found))
        if count == 1 or seen < count or "JAX_LOCAL_DEVICE_IDS" in environ:
            return None
        return list(range(index * seen // count, (index + 1) * seen // count))


@dataclass(frozen=True, slots=True)
class _Said:
    """What one place says: address, number of processes and this one's, as written (empty: nothing), what each is called
    there, and the place among the processes of a host."""

    values: tuple[str, ...]
    names: tuple[str, ...]
    local: tuple[int, int] = (0, 1)

    def completed(self, other: _Said) -> _Said:
        """Where this says nothing, what the ``other`` says."""
        both = zip(self.values, self.names, other.values, other.names, strict=True)
        chosen = [(value, name) if value else (more, called) for value, name, more, called in both]
        return _Said(tuple(value for value, _ in chosen), tuple(name for _, name in chosen), other.local)

    def peers(self) -> Peers | None:
        """None if there is one process.

        Raises:
            ConfigError: something is missing, or can't be.
        """
        if missing := [name for value, name in zip(self.values, self.names, strict=True) if not value]:
            given = [name for value, name in zip(self.values, self.names, strict=True) if value]
            raise ConfigError(
                f"{_listed(given)} given, {_listed(missing)} not: several processes need all of them, one process none"
            )
        (address, *counts), (where, number_name, mine_name) = self.values, self.names
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[2]) < 65536:
            raise ConfigError(f"{where} is {address!r}; want HOST:PORT of process 0, such as node-1:61440")
        number, mine = (_whole(text, name) for text, name in zip(counts, (number_name, mine_name), strict=True))
        if not 0 <= mine < number:
            raise ConfigError(
                f"{mine_name} is {mine} and {number_name} {number}; processes are numbered from 0 to one less"
            )
        return Peers(found[1], int(found[2]), number, mine, self.local) if number > 1 else None


def find_peers(flags: Sequence[object | None], environ: Mapping[str, str] = os.environ) -> Peers | None:
    """The run that this process belongs to, or None if it is alone. ``flags``: of ``--coordinator``, ``--processes`` and
    ``--process``, None where not given.

    Raises:
        ConfigError: half a set was given, or one that can't be.
    """
    values = tuple("" if flag is None else str(flag) for flag in flags)
    if any(values):
        return _Said(values, ("--coordinator", "--processes", "--process")).peers()
    address = "JAXPIPE_COORDINATOR" if environ.get("JAXPIPE_COORDINATOR") else "JAX_COORDINATOR_ADDRESS"
    own = _said(environ, (address, "JAXPIPE_PROCESSES", "JAXPIPE_PROCESS"), "JAXPIPE_LOCAL_PROCESS")
    if own.values == ("", "1", ""):
        return None
    if not own.values[2]:
        for launcher in (_torchrun, _slurm, _kubernetes, _open_mpi):
            if any((said := launcher(environ)).values):
                return own.completed(said).peers()
    return own.peers() if any(own.values) else None


def _said(environ: Mapping[str, str], names: tuple[str, ...], local: str = "", of: str = "") -> _Said:
    """What these variables say. ``local``, ``of``: the variables of the place on the host."""
    place = environ.get(local, ""), environ.get(of or f"{local}ES", "")
    both = all(place)
    return _Said(
        tuple(environ.get(name, "") for name in names),
        names,
        (_whole(place[0], local), _whole(place[1], of or f"{local}ES")) if both else (0, 1),
    )


def _torchrun(environ: Mapping[str, str]) -> _Said:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal():
        port = str(int(port) + 1)  # torchrun itself listens there
    names = ("MASTER_ADDR and MASTER_PORT", "WORLD_SIZE", "RANK")
    address = {names[0]: f"{host}:{port}"} if host and port else {}
    return _said({**environ, **address}, names, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _slurm(environ: Mapping[str, str]) -> _Said:
    """Read a Slurm step's variables: those of the job are set for a batch script and a shell, too."""
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    nodes = environ.get(names[0], "")
    if not nodes:
        return _Said(("", "", ""), names)
    job, step = (_whole(environ.get(name, "0"), name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2),3
    tasks = [count for count, times in entries for _ in range(int(times or 1))]
    here = dict(enumerate(tasks)).get(_whole(environ.get("SLURM_NODEID", "0"), "SLURM_NODEID"), "")
    address = f"{_first_host(nodes)}:{_FIRST_PORT + (10 * job + 2 * step) % _PORTS}"
    return _said({**environ, names[0]: address, "tasks of the node": here}, names, "SLURM_LOCALID", "tasks of the node")


def _first_host(nodes: str) -> str:
    """``rack1-node04`` of ``rack[1-2]-node[04-07,11],other``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _kubernetes(environ: Mapping[str, str]) -> _Said:
    return _said(environ, ("JAXPIPE_COORDINATOR", "JAXPIPE_PROCESSES", "JOB_COMPLETION_INDEX"))


def _open_mpi(environ: Mapping[str, str]) -> _Said:
    """The address of mpirun's host, where process 0 usually is; newer versions don't tell."""
    names = ("JAXPIPE_COORDINATOR", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    found = re.match(r"(\d+).*?;tcp6?://([^,:;]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    port = _FIRST_PORT + 2 * (int(found[1]) >> 16) % _PORTS if found else 0
    address = {names[0]: f"{found[2]}:{port}"} if found else {}
    return _said({**environ, **address}, names, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _whole(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise ConfigError(f"{name} is {text!r}; want a whole number")
    return int(text)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
