"""Child processes forked from one that has imported jaxpipe: importing takes longer than most of them run.

    python -m tests.support.forks SOCKET    # the server: forks a process for each request that comes by this descriptor

A fork sees what a new ``python -c CODE ARGUMENTS`` would: environment, directory, output, signals and ``__main__``; no backend
of JAX has begun in the server. Forks of one server share the seed of their hashes: a test that nothing depends on it starts
new Pythons.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.support.paths import ROOT

IMPORTED = ("jaxpipe.cli.train_verbs", "jaxpipe.train.loop", "models.gpt", "tests.support.train_runs")
_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start ``python -u -c CODE ARGUMENTS`` in the repository's root; its output is text in pipes."""
    kind = _Fork if sys.platform == "linux" else subprocess.Popen
    command = [sys.executable, "-u", "-c", code, *arguments]
    return kind(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class _Fork(subprocess.Popen[str]):
    """A child of this process, though another one forks it."""

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        sys.audit("subprocess.Popen", sys.executable, args, ROOT, None)
        # those ends of the pipes that the child writes to
        out, err = options[12], options[14]
        request = {"code": args[3], "arguments": args[4:], "environment": dict(os.environ)}
        try:
            self.pid = _server().fork(request, out, err)
        finally:
            for descriptor in (out, err):
                os.close(descriptor)
        self._child_created = True


@functools.cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def fork(self, request: dict[str, Any], *outputs: int) -> int:
        """Return the id of the new process, which has become a child of this one."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_CHILD_SUBREAPER, 1)
        try:
            line = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(line).to_bytes(8)], outputs)
            self._socket.sendall(line)
            return int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL))
        finally:
            prctl(_CHILD_SUBREAPER, 0)  # other orphans are not ours to wait for


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, which is returned in the new process. Ends this process when no request can come."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        length, outputs, _, _ = socket.recv_fds(requests, 8, 2)
        if not length:
            sys.exit()
        request: dict[str, Any] = json.loads(requests.recv(int.from_bytes(length), socket.MSG_WAITALL))
        reader, writer = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)  # from now on its child is that of the process that asked
            requests.sendall(os.read(reader, 8))
            for descriptor in (reader, writer, *outputs):
                os.close(descriptor)
            continue
        between = os.getpid()
        if pid := os.fork():
            os.write(writer, pid.to_bytes(8))
            os._exit(0)
        while os.getppid() == between:
            os.sched_yield()
        requests.close()
        os.close(reader)
        os.close(writer)
        for number, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, number)
            os.close(output)
        return request


def begin(code: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    """Run the code in this process, as a new ``python -u -c`` does."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w"), encoding=stream.encoding, errors=stream.errors, write_through=True)
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    begin(request["code"], request["arguments"], request["environment"])
