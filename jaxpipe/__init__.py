"""jaxpipe: pipeline-parallel training for JAX.

``Trainer`` is the way in from Python; ``data``, ``load_params``, ``import_folder``, ``export``, ``evaluate`` and ``generate``
do what the verbs of the command line do. :file:`train/GUIDE.md` has complete scripts. Importing this package imports no JAX:
the names below are looked up when they are first used, and the rooms are imported by name (``jaxpipe.schedule``, …).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpipe.stage.model.adapters import from_linen, from_nnx, layers_from_linen
    from jaxpipe.stage.model.cut_nnx import layers_from_nnx, module_params, update_module
    from jaxpipe.stage.model.layer import Layer, Model
    from jaxpipe.train.data import Data
    from jaxpipe.train.devices import join, request_devices
    from jaxpipe.train.trainer import Trainer
    from jaxpipe.train.verbs import data, evaluate, export, generate, import_folder, load_params

__version__ = "0.2.0"
__all__ = [
    "Data",
    "Layer",
    "Model",
    "Trainer",
    "__version__",
    "data",
    "evaluate",
    "export",
    "from_linen",
    "from_nnx",
    "generate",
    "import_folder",
    "join",
    "layers_from_linen",
    "layers_from_nnx",
    "load_params",
    "module_params",
    "request_devices",
    "update_module",
]

_HOMES = {
    "Data": "train.data",
    "Layer": "stage.model.layer",
    "Model": "stage.model.layer",
    "Trainer": "train.trainer",
    "data": "train.verbs",
    "evaluate": "train.verbs",
    "export": "train.verbs",
    "from_linen": "stage.model.adapters",
    "from_nnx": "stage.model.adapters",
    "generate": "train.verbs",
    "import_folder": "train.verbs",
    "join": "train.devices",
    "layers_from_linen": "stage.model.adapters",
    "layers_from_nnx": "stage.model.cut_nnx",
    "load_params": "train.verbs",
    "module_params": "stage.model.cut_nnx",
    "request_devices": "train.devices",
    "update_module": "stage.model.cut_nnx",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpipe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"jaxpipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
