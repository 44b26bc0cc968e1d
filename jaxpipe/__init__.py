"""jaxpipe: pipeline-parallel training for JAX.

``Trainer`` is the way in from Python; ``data``, ``load_params``, ``import_folder``, ``export``, ``evaluate`` and ``generate``
do what the verbs of the command line do. :file:`train/GUIDE.md` has complete scripts. Importing this package imports no JAX:
the names below are looked up when they are first used, and the rooms are imported by name (``jaxpipe.schedule``, …).
"""

from typing import TYPE_CHECKING

from jaxpipe.lazy import exported

if TYPE_CHECKING:
    from jaxpipe.stage.model.adapters import from_linen, from_nnx, layers_from_linen
    from jaxpipe.stage.model.cut_nnx import layers_from_nnx, module_params, update_module
    from jaxpipe.stage.model.layer import Layer, Model, With
    from jaxpipe.train.data import Data
    from jaxpipe.train.devices import join, request_devices
    from jaxpipe.train.trainer import Trainer
    from jaxpipe.train.verbs import data, evaluate, export, generate, import_folder, load_params

__version__ = "0.2.0"
__all__ = ["Data", "Layer", "Model", "Trainer", "With", "__version__", "join", "request_devices"]
__all__ += ["from_linen", "from_nnx", "layers_from_linen", "layers_from_nnx", "module_params", "update_module"]
__all__ += ["data", "evaluate", "export", "generate", "import_folder", "load_params"]

_, __getattr__ = exported(
    __name__,
    **{
        "stage.model.adapters": "from_linen from_nnx layers_from_linen",
        "stage.model.cut_nnx": "layers_from_nnx module_params update_module",
        "stage.model.layer": "Layer Model With",
        "train.data": "Data",
        "train.devices": "join request_devices",
        "train.trainer": "Trainer",
        "train.verbs": "data evaluate export generate import_folder load_params",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
