"""What all processes of a run do with a checkpoint: the same comes of it in each of them, or the same error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpipe.errors import CheckpointError
from jaxpipe.runtime.processes import Processes
from jaxpipe.train.checkpoints import directory as shelf
from jaxpipe.train.checkpoints.directory import Intact
from jaxpipe.train.checkpoints.format import (
    DamagedCheckpointError,
    RemovedCheckpointError,
    UnreadableCheckpointError,
    reason,
)

_ON_DISK = (DamagedCheckpointError, RemovedCheckpointError)
"""Errors that are not of the process that has found them."""
_KINDS = {kind.__name__: kind for kind in (CheckpointError, UnreadableCheckpointError, *_ON_DISK)}


def together(
    processes: Processes,
    name: str,
    mine: Callable[[], Any] = lambda: None,
    first: Callable[[Sequence[Any]], Any] = lambda _: None,
) -> Any:
    """``mine()`` in every process, then ``first`` in process 0 with what that was in each; its result, in all. What they return
    is for JSON, unless there is one process.

    Raises:
        CheckpointError: one of them raised anything; in all processes, in the same words. Of one process, what it raised.
    """
    if processes.number == 1:
        return first([mine()])
    cause: BaseException | None = None
    said: dict[str, Any]
    try:
        said = {"value": mine()}
    except Exception as error:
        cause, said = error, _told(error, "" if isinstance(error, _ON_DISK) else f"{processes.who(processes.mine)}: ")
    answer: dict[str, Any] = {}
    if answers := processes.gather(name, said):
        answer = next((one for one in answers if "kind" in one), answer)
        if not answer:
            try:
                answer = {"value": first([one["value"] for one in answers])}
            except Exception as error:
                cause, answer = error, _told(error)
    answer = processes.broadcast(name, answer)
    if "kind" in answer:
        kind = _KINDS.get(answer["kind"], CheckpointError)
        raise kind(answer["text"]) from cause
    return answer["value"]


def newest_intact(processes: Processes, directory: Path, before: int | None) -> Intact:
    """As ``checkpoint_directory.newest_intact``; each process verifies a share of the files of a checkpoint."""
    if processes.number == 1:
        return shelf.newest_intact(directory, before)

    def verify(folder: Path) -> CheckpointError | None:
        def mine() -> None:
            if error := shelf.damage(folder, (processes.mine, processes.number)):
                raise error

        try:
            together(processes, "verified", mine)
        except CheckpointError as error:
            return error
        return None

    def lead() -> tuple[int | None, tuple[str, ...]]:
        try:
            found = shelf.newest_intact(
                directory, before, lambda folder: verify(directory / processes.broadcast("verify", folder.name))
            )
        finally:
            processes.broadcast("verify", "")
        return found.step, found.warnings

    def follow() -> None:
        while name := processes.broadcast("verify", ""):
            verify(directory / name)

    mine = follow if processes.mine else lead
    step, warnings = together(processes, "newest checkpoint", mine, lambda found: found[0])
    return Intact(step, tuple(warnings))


def _told(error: Exception, who: str = "") -> dict[str, str]:
    text = str(error) if isinstance(error, CheckpointError) else reason(error)
    return {"kind": type(error).__name__, "text": f"{who}{text}"}
