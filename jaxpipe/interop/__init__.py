"""Folders of the Hugging Face hub in and out: tables of tensors, safetensors files, ``config.json``, tokenizers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "config": "Keys refused",
    "folder": "Planned new_folder read_json write_json write_tensors",
    "hub": "Hub Weights is_hub open_hub weights_of",
    "table": "HuggingFace Tensor hugging_face_of",
}
__all__ = sorted(" ".join(_HOMES.values()).split())


def __getattr__(name: str) -> Any:
    """What of ``__all__`` is asked for, out of its module."""
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
