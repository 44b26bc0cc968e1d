"""Again: config, data, step, loop, checkpoint, metrics. The only room that knows a step number or a learning rate.

Importing this package imports no JAX; the modules that need it import it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_HOMES = {
    "checkpoint": "Checkpoint CheckpointStore load_params read_manifest",
    "config": "TrainConfig load_config",
    "data": "Dataset TokenDataset",
    "devices": "find_devices request_devices",
    "evaluate": "generate held_out_score load_data load_trained",
    "exported": "export_hub",
    "imported": "import_hub",
    "loop": "TrainResult train",
    "state": "StepMetrics TrainState",
    "step": "TrainStep",
    "trainer": "Trainer",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def looked_up(package: str, homes: Mapping[str, str], name: str) -> Any:
    """A public name of a package, out of the module that ``homes`` says: it is imported when it is first asked for."""
    home = next((home for home, names in homes.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(f"{package}.{home}"), name)


def __getattr__(name: str) -> Any:
    return looked_up(__name__, _HOMES, name)
