"""Ctrl-C as a terminal sends it, to the whole group of processes: each verb ends soon, in one line, with 130."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT
from tests.support.processes import LONG_S

VERBS = ("schedule", "solve", "tune", "data", "train", "launch")
"""Those that have processes of their own, compile, or search; all of them in the soak."""
ALL = (
    *VERBS,
    "simulate",
    "compare",
    "best",
    "plot",
    "cache",
    "plan",
    "rehearse",
    "profile",
    "eval",
    "generate",
    "export",
    "import",
)


@pytest.fixture(scope="module")
def interrupts() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scripts"))
    from torture_parts import interrupts

    yield interrupts
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on a mat and that dog ran\n" * 1600)
    return path


@pytest.mark.parametrize(
    ("name", "after_s"),
    [
        *((name, 1.0) for name in VERBS),
        pytest.param("tune", 3.0, marks=pytest.mark.soak),
        pytest.param("data", 2.0, marks=pytest.mark.soak),
    ],
)
def test_verbs_end(interrupts: ModuleType, text: Path, tmp_path: Path, name: str, after_s: float) -> None:
    (tmp_path / "large.txt").write_text(text.read_text() * 500)
    interrupts.interrupt(interrupts.verbs(tmp_path, text)[name], after_s, LONG_S)


@pytest.mark.soak
def test_all_verbs_at_any_time(interrupts: ModuleType, text: Path, tmp_path: Path) -> None:
    interrupts.prepare(tmp_path, text)
    for name in ALL:
        for after_s in (0.15, 0.5, 1.5, 4.0):
            interrupts.interrupt(interrupts.verbs(tmp_path, text)[name], after_s)
    assert set(ALL) == set(interrupts.verbs(tmp_path, text))


BUSY = """
import signal, sys, time
sys.argv = ["jaxpipe", "cache", "ls"]
from jaxpipe import interrupts
from jaxpipe.cli import main, registry
interrupts.last_words += [print] * LAST
def busy(argv):
    print("busy", flush=True)
    HOW
registry.run = busy
sys.exit(main())
"""


HOLD = "exec('while True:\\n try: time.sleep(600)\\n except BaseException: pass')"


@pytest.mark.parametrize(
    "how",
    [
        "time.sleep(600)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); time.sleep(600)",  # as where no Python runs
        HOLD,  # what does not let go
        f"import _imp; del sys.modules['pathlib']; _imp.acquire_lock(); {HOLD}",  # in an import
        "exec('try: time.sleep(600)\\nfinally: raise ValueError')",  # what another exception comes of
        "exec('try: time.sleep(600)\\nexcept KeyboardInterrupt: return_value = 0')",  # what ends well after it
        "import subprocess; subprocess.run(['sleep', '600'])",
    ],
)  # fmt: skip
def test_whatever_the_main_thread_does(how: str) -> None:
    last = how == HOLD
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY.replace("HOW", how).replace("LAST", str(last))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "busy\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, err) == (130, "jaxpipe: interrupted\n")
    assert out == ("was interrupted 130\n" if last else "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    """nohup, and a shell's &, start a process with the interrupt ignored; it stays so."""
    code = BUSY.replace("HOW", "import os; os.kill(os.getpid(), signal.SIGINT); return 0").replace("LAST", "0")
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{code}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
