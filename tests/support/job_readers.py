"""Readers of job files as those programs read them that jaxpipe writes them for: sbatch, bash, and Kubernetes."""

from __future__ import annotations

import os
import re
import subprocess
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

STRAY = [*map(chr, range(32)), "\x7f", "\x85", "\x9f", "\u2028", "\u2029", "\ud800", "\udcff", "\uffff"]
"""Characters that no value in a job file may hold."""
ODD = [
    *"'\"`$#!\\;&|<>(){}[]*?~^%@:=,.-_ \t",
    "$(HOSTNAME)",
    "$$",
    "${HOME}",
    "`id`",
    "$(id)",
    "--",
    "hetjob",
    "PackJob",
]
ODD += ["\xa0", "\u200d", "\u202e", "\ufeff", "é", "語", "😀", "kind: Evil", "#SBATCH --x=y", "' ; exit 9 #", "\\n", ""]
"""Text that means something to one of the readers, or is not ASCII."""


def is_stray(text: str) -> bool:
    """Return whether ``text`` holds a control character, a line break, half of a surrogate pair, or a noncharacter of YAML."""
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or ord(c) & 0xFFFE == 0xFFFE for c in text)


def sbatch_options(script: str) -> list[str]:
    """Return the options in the ``#SBATCH`` lines of a script, which end at its first command; by the rules of Slurm's
    ``_get_argument``: quotes, backslashes, comments, and the two words that some releases blank out first."""
    options: list[str] = []
    for line in script.split("\n"):
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options += _words(
                re.sub("(?i)packjob|hetjob", lambda word: " " * len(word[0]), line.removeprefix("#SBATCH"))
            )
    return options


def _words(line: str) -> list[str]:
    words, k = [], 0
    while k < len(line):
        if line[k] in " \t":
            k += 1
            continue
        word, quote, escaped = "", "", False
        while k < len(line) and (quote or line[k] not in " \t"):
            character = line[k]
            if escaped:
                escaped = False
            elif character == "\\":
                escaped, k = True, k + 1
                continue
            elif quote and character == quote:
                quote, k = "", k + 1
                continue
            elif not quote and character in "\"'":
                quote, k = character, k + 1
                continue
            elif not quote and character == "#":
                return [*words, word] if word else words
            word, k = word + character, k + 1
        assert not quote, f"unmatched {quote} in {line}"
        words.append(word)
    return words


def srun_arguments(script: Path, folder: Path) -> list[str]:
    """Return the arguments with which a script, run by bash in ``folder``, calls ``srun``, without srun's own options."""
    tools, written = folder / "tools", folder / "argv"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {written}\n')
    (tools / "srun").chmod(0o755)
    subprocess.run(["bash", "-n", str(script)], check=True)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "HOSTNAME": "evil"}
    subprocess.run(["bash", str(script)], check=True, cwd=folder, env=environ)
    words = written.read_bytes().decode().split("\0")[:-1]
    assert words[:4] == ["--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none", "--label"]
    return words[4:]


def pod_of(jobset: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the document, and the specification of its pods, whose container's command is as the container gets it."""
    document = yaml.safe_load(jobset)
    pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {"HOSTNAME": "evil", "id": "evil"} | {entry["name"]: entry["value"] for entry in container["env"]}
    container["command"] = [_expanded(word, environ) for word in container["command"]]
    return document, pod


def _expanded(word: str, environ: Mapping[str, str]) -> str:
    """Return the word after Kubernetes' expansion: ``$$`` is ``$``, ``$(NAME)`` the value of a variable that there is."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else environ.get(match[1], match[0]), word
    )
