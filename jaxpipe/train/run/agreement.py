"""Check that the processes of a run agree: on versions, settings, those of JAX too, devices, data, the code of the model and a
run directory that all see, before any of them changes something; then on the batches of steps that are recorded. What differs
is said by all in one line, which names the process and the setting.

Importing this imports no JAX. In one process nothing is looked at.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from platform import python_version_tuple
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from jaxpipe.runtime.processes import Processes
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.devices import number_settings, request_devices
from jaxpipe.train.settings.sections import AXIS_FLAGS, PipelineConfig

if TYPE_CHECKING:
    import jax

    from jaxpipe.stage.model.layer import Model

_MAY_DIFFER = ("run.out_dir", "run.machine.compile_cache", "data.path", "data.tokenizer")
"""Paths: another host may have other ones. What is there is compared."""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SEEN_WITHIN_S = 10.0


def agree_on_settings(
    processes: Processes, config: TrainConfig, flags: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Before JAX is started. ``flags``: those that the config does not hold.

    Raises:
        AgreedError: versions or settings differ, or the run directory is not one that all see.
    """
    if processes.number == 1:
        return
    agree_on_versions(processes)
    settings = {key: str(value) for key, value in config.by_key().items() if key not in _MAY_DIFFER}
    processes.require_equal("settings", {**settings, **flags}, "start all with one config")
    _agree_on_folder(processes, Path(config.run.out_dir))


def agree_on_versions(processes: Processes) -> None:
    """Raises AgreedError if processes have other versions of what they compute with."""
    from jaxpipe import __version__

    versions = {"jaxpipe": __version__, "Python": ".".join(python_version_tuple()[:2])}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    processes.require_equal("versions", versions, "install one version on all hosts")


def agree_on_devices(processes: Processes, pipe: PipelineConfig) -> None:
    """Once JAX is started.

    Raises:
        AgreedError: devices are of several kinds or numbers, or too few for the ranks of a process.
    """
    if processes.number == 1:
        return
    import jax

    devices = jax.local_devices()
    kind = devices[0].device_kind
    local_devices = {"devices": kind if devices[0].platform == "cpu" else f"{len(devices)} × {kind}"}
    processes.require_equal("devices", local_devices, "use equal hosts, and see that all have their drivers")
    processes.require_equal("JAX settings", number_settings(), "set JAX and XLA alike in all, as numbers depend on it")
    mine = processes.ranks(pipe.ranks)[processes.mine]
    need = len(mine) * pipe.mesh.num_devices // processes.columns
    few = f"{len(mine)} ranks need {need} devices and JAX sees {len(devices)} there"
    advice = f"start more processes, or lower --pp, {AXIS_FLAGS}"
    processes.raise_if_any("enough devices", f"{few}; {advice}" if len(devices) < need else "")


def devices_of(
    pipe: PipelineConfig, platform: Literal["auto", "cpu", "gpu"], processes: Processes
) -> Sequence[jax.Device]:
    """Return the devices of all ranks, in order; of a rank of several processes, those of each column in turn.

    Raises:
        ConfigError: as :func:`~jaxpipe.train.devices.find_devices`.
    """
    from jaxpipe.train.devices import find_devices

    if processes.number == 1:
        return find_devices(pipe.num_devices, platform, pipe.mesh)
    import jax

    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    columns = processes.columns
    size = pipe.mesh.num_devices // columns
    rows = list(enumerate(processes.ranks(pipe.ranks)))[::columns]
    return [
        device
        for first, row_ranks in rows
        for position in range(len(row_ranks))
        for process in range(first, first + columns)
        for device in by_process[process][position * size : (position + 1) * size]
    ]


def lay_out(processes: Processes, pipe: PipelineConfig, columns: int) -> None:
    """Lay out the processes of a :class:`~jaxpipe.Trainer`, which may have been given different sizes.

    Raises:
        AgreedError: they were, or as :meth:`~jaxpipe.runtime.processes.Processes.arrange`.
    """
    sizes = {"ranks": pipe.ranks, "devices of a rank": pipe.mesh, "columns": columns}
    sums = {"zero1": pipe.sharding.zero1, "reduction": pipe.sharding.reduction}
    settings = {name: str(value) for name, value in {**sizes, **sums}.items()}
    # First of all: processes of other grids, or with other sums, would wait for each other.
    processes.require_equal("grid", settings, "give every Trainer the same")
    processes.arrange(pipe.ranks, pipe.mesh, columns)


def find_trainer_devices(
    pipe: PipelineConfig, platform: Literal["auto", "cpu", "gpu"], processes: Processes
) -> Sequence[jax.Device]:
    """Return the devices of all ranks of a :class:`~jaxpipe.Trainer`. Where JAX has not looked for any yet, CPU devices are
    emulated on a machine that has nothing else.

    Raises:
        AgreedError, ConfigError: as :func:`agree_on_devices` and :func:`devices_of`.
    """
    from jaxpipe._jax_compat import backends_initialized

    if not backends_initialized():
        request_devices(pipe.num_devices, platform)
    agree_on_devices(processes, pipe)
    return devices_of(pipe, platform, processes)


def agree_on_training(
    processes: Processes,
    settings: Mapping[str, Any],
    model: Model,
    program: Callable[[], Mapping[str, str]],
    optimizer: Any,
    arguments: Mapping[str, Any],
) -> None:
    """Compare what the processes of a :class:`~jaxpipe.Trainer` would train, beside their programs (which
    :meth:`~jaxpipe.runtime.transfer.Ownership.agree_on_programs` does). ``program``: as for :func:`agree_on_model`;
    ``arguments``: of the optimizer's update.

    Raises:
        AgreedError: versions, ``settings``, the code of the model or the optimizer's update differ.
    """
    if processes.number == 1:
        return
    import jax
    import jax.numpy as jnp
    import optax

    from jaxpipe.stage.identity import program_digest
    from jaxpipe.stage.model.params import trained_params
    from jaxpipe.stage.model.plan import param_avals

    agree_on_versions(processes)
    processes.require_equal(
        "settings", {name: str(value) for name, value in settings.items()}, "give every Trainer the same"
    )
    agree_on_model(processes, model.name, program)
    params = trained_params(model.layers, param_avals(model))
    update = optax.with_extra_args_support(optimizer).update
    state, values = jax.eval_shape(optimizer.init, params), {"value": jnp.zeros(()), **arguments}
    jaxpr = jax.make_jaxpr(lambda g, s, p, values: update(g, s, p, **values))(params, state, params, values)
    digest = {"digest of the update": program_digest(jaxpr)[:12]}
    processes.require_equal("optimizer", digest, "give every Trainer the same optimizer")


def agree_on_data(processes: Processes, fingerprint: str) -> None:
    """Raises AgreedError if the data that the processes have read differ."""
    if processes.number > 1:
        processes.require_equal("data", {"data": fingerprint}, "give all the same data.path and data.tokenizer")


def agree_on_model(processes: Processes, target: str, program: Callable[[], Mapping[str, str]]) -> None:
    """Raises AgreedError if the models that the processes have made compute or learn something else. ``program``: the digest
    (:func:`~jaxpipe.train.checkpoints.which_model.model_digest`) of the one here."""
    if processes.number > 1:
        digests = {f"{target}: digest of {name}": digest[:12] for name, digest in program().items()}
        processes.require_equal("model", digests, "give all the same code of the model")


def agree_on_batch(processes: Processes, what: str, batch: Mapping[str, Any]) -> None:
    """Raises AgreedError if the arrays of a batch differ between processes. ``what``: which batch it is."""
    if processes.number > 1:
        from jaxpipe.stage.identity import array_key

        arrays = {
            f"{what}: {name}": hashlib.sha256(repr(array_key(x)).encode()).hexdigest()[:12] for name, x in batch.items()
        }
        processes.require_equal(
            "batch", arrays, "all processes must get the same batches (data.target, data.path), by seed and step"
        )


def _agree_on_folder(processes: Processes, folder: Path) -> None:
    """Process 0 writes a file, and the others look for it."""
    name = processes.broadcast("file", f".jaxpipe-{uuid.uuid4().hex}" if processes.mine == 0 else "")
    new_folders: list[Path] = []
    setting = f"run.out_dir={folder}"
    try:
        wrong = ""
        if processes.mine == 0:
            new_folders = [p for p in (folder, *folder.parents) if not p.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            except OSError as error:
                wrong = f"{setting} can't be written ({error.strerror}); choose another directory"
        processes.raise_if_any("written", wrong)
        elsewhere = (
            f"{setting} is not the directory that process 0 sees: choose one on a file system that all hosts share"
        )
        processes.raise_if_any("folder", "" if _appears(folder / name) else elsewhere)
    finally:
        if processes.mine == 0:
            with suppress(OSError):
                (folder / name).unlink()
                for path in new_folders:
                    path.rmdir()


def _appears(file: Path) -> bool:
    """Return whether it does soon; another host's file system may show it late."""
    # Listing the folder makes an NFS client ask its server again, where it would answer from its cache for seconds.
    until = time.monotonic() + _SEEN_WITHIN_S
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
        with suppress(OSError):
            list(file.parent.iterdir())
    return True
