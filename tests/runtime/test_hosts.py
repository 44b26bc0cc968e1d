"""A run on two hosts, which are namespaces of this machine: each with a network, a name and an /etc/hosts of its own, joined by
a cable. Debian and Ubuntu name a host's own address 127.0.1.1 there. It needs root, ``unshare`` and ``ip``."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxpipe.errors import LOST
from tests.runtime.test_divided import assert_same_run
from tests.support import train_runs
from tests.support.paths import ROOT
from tests.support.processes import free_port
from tests.support.train_runs import config, settings, write_text

_NAMESPACES = ("--net", "--uts", "--mount")
_BOOT = """
mount --bind "$1" /etc/hosts && hostname "node-$2" && ip link set lo up && echo ready && exec sleep 600
"""
Start = Callable[..., list[subprocess.Popen[str]]]


def _can_make_hosts() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Provide a function that starts ``jaxpipe train`` in so many processes on each of two hosts. The parameter: the style of
    hosts files."""
    if not _can_make_hosts():
        pytest.skip("no namespaces can be made here")
    boots = []
    try:
        for host in (0, 1):
            own = "127.0.1.1" if request.param == "debian" else f"10.77.0.{host + 1}"
            names = f"127.0.0.1 localhost\n{own} node-{host}\n10.77.0.{2 - host} node-{1 - host}\n"
            (tmp_path / f"hosts.{host}").write_text(names)
            command = ["unshare", *_NAMESPACES, "sh", "-c", _BOOT, "sh", tmp_path / f"hosts.{host}", str(host)]
            boots.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert boots[-1].stdout is not None and boots[-1].stdout.readline() == "ready\n"
        first, second = (str(boot.pid) for boot in boots)
        cable = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(cable, check=True)
        for host, boot in enumerate(boots):
            for arguments in (["addr", "add", f"10.77.0.{host + 1}/24", "dev"], ["link", "set", "up", "dev"]):
                subprocess.run(["nsenter", "-t", str(boot.pid), "-n", "ip", *arguments, "eth0"], check=True)

        def start(each: int, *overrides: str) -> list[subprocess.Popen[str]]:
            flags = ("--coordinator", f"node-0:{free_port()}", "--processes", str(2 * each))
            return [
                subprocess.Popen(
                    ["nsenter", "-t", str(boot.pid), "-n", "-u", "-m", f"--wd={ROOT}", sys.executable, "-um", "jaxpipe",
                     "train", *flags, "--process", str(process), *overrides],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for process, boot in enumerate(boot for boot in boots for _ in range(each))
            ]  # fmt: skip

        yield start
    finally:
        for boot in boots:
            boot.kill()
            boot.communicate()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("hosts", "each", "dp"), [("debian", 2, 1), ("plain", 1, 1), ("debian", 1, 2)], indirect=["hosts"]
)
def test_two_hosts_train_are_killed_and_go_on(hosts: Start, each: int, dp: int, tmp_path: Path) -> None:
    """Metrics and the last checkpoint are those of one process."""
    text = write_text(tmp_path / "text")
    overrides = ("run.log_every=1", "run.checkpoint_every=2", "run.steps=12", "pipeline.schedule=zb-1p")
    overrides = (
        *overrides,
        f"pipeline.ranks={2 * each // dp}",
        f"pipeline.dp={dp}",
        f"model.options.num_layers={2 * each}",
    )
    train_runs.run(config(text, tmp_path / "whole", *overrides))
    arguments = (*settings(text, tmp_path / "parts", *overrides), "run.platform=cpu")
    first, *others = hosts(each, *arguments)
    train_runs.read_until(first, "step 7")  # the save of step 4 waited for that of step 2
    others[-1].send_signal(signal.SIGKILL)
    for child in (first, *others[:-1]):
        _, said = child.communicate()
        lost = f"jaxpipe: process {len(others)} (host node-1) was lost: "
        assert child.returncode == LOST and said.startswith(lost), said
    others[-1].communicate()
    ends = [(child.communicate(), child.returncode) for child in hosts(each, *arguments)]
    assert {code for _, code in ends} == {0}, ends
    assert "resumed from step " in ends[0][0][0]
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 12)
