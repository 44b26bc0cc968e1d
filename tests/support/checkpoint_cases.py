"""Small parameter trees, saved checkpoints and comparisons for the checkpoint tests."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.axes import DP
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints.contents import join_parts, part_of, write_checkpoint
from jaxpipe.train.checkpoints.leaves import take_snapshot

META = {"data": {"epoch": 1, "position": 12345678901234567890}, "model": "tiny", "losses": [0.1, 1e-300]}


def make_params(fill: float = 0.0) -> dict[str, Any]:
    """Return a small model: two layers and one without parameters; mixed dtypes and a list."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4) + np.float32(fill)
    return {
        "embed": {"table": jnp.asarray(base, jnp.bfloat16)},
        "h.0": {
            "attention": {"q/k": jnp.asarray(base), "b": jnp.asarray(base[0])},
            "mlp": [jnp.asarray(base[:1]), jnp.int32(7)],
        },
        "dropout": {},
    }


def make_optimizer(params: dict[str, Any]) -> dict[str, Any]:
    return {layer: optax.adamw(1e-3).init(tree) for layer, tree in params.items()}


def one_line(info: pytest.ExceptionInfo[CheckpointError]) -> str:
    """Return the message, which must be one line: the CLI prints it."""
    message = str(info.value)
    assert "\n" not in message
    return message


def assert_same(got: Any, expected: Any) -> None:
    """Assert the same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def save_two(directory: Path) -> None:
    """Save checkpoints of steps 10 and 20."""
    with CheckpointStore(directory) as store:
        for step in (10, 20):
            params = make_params(step)
            store.save(step, params, make_optimizer(params), META)


def save_in_columns(folder: Path, step: int, trees_of_column: Sequence[Mapping[str, Any]]) -> list[int]:
    """Write the checkpoint of ``step`` as one row of processes does, each with its own trees by group; returns the bytes that
    each has written."""
    sizes = []
    for column, trees in enumerate(trees_of_column):
        groups = {group: take_snapshot(group, tree, (column, len(trees_of_column))) for group, tree in trees.items()}
        write_checkpoint(part_of(folder, column), step, None, META, groups)
        sizes.append(sum(snapshot.nbytes for snapshot in groups.values()))
    join_parts(folder, len(sizes))
    return sizes


def seen_in_column(tree: Any, column: int, columns: int) -> Any:
    """Return a tree of arrays of a rank as a process in one of its columns has them: of those that are divided over dp, it
    reaches the shards on its own part of the devices."""

    def seen(array: Any) -> Any:
        mesh, spec = array.sharding.mesh, array.sharding.spec
        if DP not in [name for names in spec for name in (names if isinstance(names, tuple) else (names,))]:
            return array
        devices = {*np.split(mesh.devices, columns, mesh.axis_names.index(DP))[column].flat}
        shards = [shard for shard in array.addressable_shards if shard.device in devices]
        return SimpleNamespace(
            shape=array.shape,
            size=array.size,
            dtype=array.dtype,
            sharding=array.sharding,
            addressable_shards=shards,
        )

    return jax.tree.map(seen, tree)


def save_losses(store: CheckpointStore, losses: dict[int, float | None]) -> None:
    """Save one checkpoint per step with its evaluation loss; the only array holds the step."""
    for step, loss in losses.items():
        store.save(step, {"a": np.float32(step)}, {}, {}, eval_loss=loss)
    store.wait()


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object] | str) -> None:
    """Change ``checkpoint.json`` as someone would who can compute a checksum: ``change`` edits it, or is the new text."""
    manifest, sums = folder / "checkpoint.json", folder / "SHA256SUMS"
    old = hashlib.sha256(manifest.read_bytes()).hexdigest()
    if isinstance(change, str):
        manifest.write_text(change, encoding="utf-8")
    else:
        body = json.loads(manifest.read_text(encoding="utf-8"))
        change(body)
        manifest.write_text(json.dumps(body), encoding="utf-8")
    sums.write_text(sums.read_text().replace(old, hashlib.sha256(manifest.read_bytes()).hexdigest()))


def swap_arrays(folder: Path, other: Path) -> None:
    """Put the parameters of another checkpoint of the same model into ``folder``, under right file checksums: what memory gone
    bad while Orbax wrote would leave."""
    shutil.rmtree(folder / "params")
    shutil.copytree(other / "params", folder / "params")
    lines = [(folder / "SHA256SUMS").read_text().splitlines(), (other / "SHA256SUMS").read_text().splitlines()]
    ours, theirs = (dict(line.split("  ")[::-1] for line in each) for each in lines)
    merged = {name: digest for name, digest in theirs.items() if name.startswith("params/")}
    merged |= {name: digest for name, digest in ours.items() if not name.startswith("params/")}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in merged.items()))


@contextmanager
def without_privileges() -> Iterator[None]:
    """Permissions of files hold in this thread, also for root: its two capabilities to pass over them are laid down."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, before):
        pytest.skip("no capabilities here")
    after = (ctypes.c_uint32 * 6)(*before)
    after[0] &= ~0b110  # effective, of the first 32: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, after):
        pytest.skip("capabilities can't be laid down here")
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
