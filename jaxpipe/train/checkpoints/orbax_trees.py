"""Orbax, as checkpoints use it: trees of NumPy arrays in folders, written and read by one process, whether or not there are
others.

With several processes, Orbax's own way is that all write one tree: it has them wait for each other, and its handler of NumPy
arrays writes those of process 0 alone, without a word. Here each process is told that it is the only one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax

Place: TypeAlias = tuple[str, int, int]
"""The name of a file, the first byte of an array there, and the number of its bytes."""


def write_tree(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write nested dictionaries of arrays. Raises what Orbax raises."""
    ocp = _orbax()
    # Uncompressed: trained weights shrink by a tenth, and compression takes three times the CPU, beside training.
    with _checkpointer(use_compression=False) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))


def read_tree(folder: Path, only: Mapping[str, Any] | None = None) -> Any:
    """Return what :func:`write_tree` has written; of ``only``, if given, a tree with anything in the place of an array, those
    arrays. Raises what Orbax raises."""
    ocp = _orbax()
    with _checkpointer() as checkpointer:
        if only is None:
            return checkpointer.restore(folder)
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(only, partial_restore=True))


def stored_values(folder: Path) -> dict[str, bytes | Place]:
    """Return where :func:`write_tree` has put each array that is there as it lies in memory, not compressed, by its keys joined
    with dots; of a small one its bytes. Raises what TensorStore raises, which compares the nodes that it reads with CRC-32C."""
    import tensorstore

    base = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    values: dict[str, bytes | Place] = {}

    def walk(location: str, prefix: bytes) -> None:
        for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                walk(entry["location"], prefix + entry["subtree_common_prefix"])
            else:
                _, *file, first, size = entry.get("indirect_value", "::0:0").split(":")
                place = "".join(file), int(first), int(size)
                values[(prefix + entry["key"]).decode()] = entry.get("inline_value", place)

    walk(tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"], b"")
    array_names = {key.rpartition("/")[0] for key, value in values.items() if b'"compressor":null' in value}
    chunks = ((*key.rpartition("/"), value) for key, value in values.items())
    return {name: value for name, _, chunk, value in chunks if name in array_names and not chunk.strip("0.")}


def _checkpointer(**options: Any) -> Any:
    ocp = _orbax()
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
    mine = jax.process_index()
    single_process = ocp.options.MultiprocessingOptions(
        primary_host=mine, active_processes={mine}, barrier_sync_key_prefix=f"part{mine}"
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=single_process, type_handler_registry=_arrays_of_any_process(), **options
    )
    return ocp.Checkpointer(handler, multiprocessing_options=single_process)


def _arrays_of_any_process() -> Any:
    import numpy as np
    from orbax.checkpoint._src.serialization import type_handlers

    ocp, orbax = _orbax(), type_handlers

    class Anywhere(type_handlers.NumpyHandler):  # type: ignore[misc]
        """Writes in the process that has the arrays."""

        async def _background_serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> None:
            async def write(value: np.ndarray, info: Any, arg: Any) -> None:
                await info.await_path_creation()
                where = orbax.ocdbt_utils.get_process_index_for_subdir(use_ocdbt=info.is_ocdbt_checkpoint)
                spec = orbax.ts_utils.build_array_write_spec(
                    info=info,
                    arg=arg,
                    global_shape=value.shape,
                    local_shape=value.shape,
                    dtype=value.dtype,
                    use_ocdbt=info.is_ocdbt_checkpoint,
                    process_index=where,
                )
                await self._open_and_write(value, spec.json, info.ts_context)

            await asyncio.gather(*map(write, values, infos, args))

    return ocp.type_handlers.create_type_handler_registry((np.ndarray, Anywhere()))


def _orbax() -> Any:
    """Orbax, imported at first use (it is slow), without what it logs and prints of exceptions that it also raises, nor of
    settings that are meant."""
    import orbax.checkpoint

    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_worth_a_line)
    if not isinstance(sys.unraisablehook, _WithoutLateCallbacks):
        sys.unraisablehook = _WithoutLateCallbacks(sys.unraisablehook)
    return orbax.checkpoint


@dataclass(frozen=True, slots=True)
class _WithoutLateCallbacks:
    """The hook for exceptions that nobody can catch, but for those of TensorStore's threads that report to an event loop which
    ended with the first error of a save: that one was raised."""

    hook: Any

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.hook(unraisable)


def _worth_a_line(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "exception was never retrieved" in text:  # of several writes that failed, one is raised
        trace = text + "".join(traceback.format_exception(*record.exc_info) if record.exc_info else ())
        return not ("tensorstore" in trace or "orbax" in trace)
    return not ("_SignalingThread.run() raised" in text or "ArrayMetadata persistence is disabled" in text)
