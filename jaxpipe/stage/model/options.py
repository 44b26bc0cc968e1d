"""Frozen option dataclasses made from plain mappings: names checked with suggestions, types checked, one line an error.

Models take their options this way (``GPT(**options)``), so that a configuration file's ``[model.options]`` table and a Python
call get the same messages. It handles int, float, bool, str and ``X | None`` fields and option dataclasses inside one another,
which is what a model needs; other tables belong to :mod:`jaxpipe.train.config`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.text import closest, divisors_of

T = TypeVar("T")


def build_options(cls: type[T], options: Mapping[str, Any], what: str) -> T:
    """``cls(**options)`` for an option dataclass ``cls``; ``what`` names it in messages (``"models.gpt:GPT"``).

    Raises ConfigError when an option is unknown (with the nearest name), missing, or of the wrong type. Checks of values are
    the dataclass's own, in its ``__post_init__``. An int is accepted where a float is wanted.
    """
    table = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}  # type: ignore[arg-type]
    check_names(what, options, table)
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(value, hints[name], f"{what}: {name}") for name, value in options.items()})


def options_of(config: Any) -> dict[str, Any]:
    """The options that :func:`build_options` makes an equal ``config`` of, as values that TOML and JSON can hold: all of them,
    so that later defaults change nothing, but those that are None, as they are by default."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    nested = {name: options_of(value) if is_dataclass(value) else value for name, value in values.items()}
    return {name: value for name, value in nested.items() if value is not None}


def check_names(what: str, options: Iterable[str], required: Mapping[str, bool]) -> None:
    """Raise ConfigError, with the nearest name that exists, unless ``options`` are among the names in ``required``, and all
    that are needed are there."""
    options = list(options)
    for name in options:
        if name not in required:
            raise ConfigError(f"{what} has no option {name!r}{suggestion(name, required)}")
    for name, must in required.items():
        if must and name not in options:
            raise ConfigError(f"{what} needs the option {name}; give {name}=…")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known one, then all of them."""
    names = list(names)
    return f"{closest(name, names, ';')} Known: {', '.join(names)}" if names else ""


def divisors(n: int) -> str:
    """List the divisors of ``n`` as an error message does."""
    return ", ".join(map(str, divisors_of(n)))


def check_sizes(what: str, **sizes: int | None) -> None:
    """Raise ConfigError unless each size (None: left to the model) is from 1 to 2^20, or to 2^31 - 1 of what is counted along
    one axis alone (``vocab_size``, ``seq_len``), or to 4096 layers (``num_layers``). ``what`` names the model."""
    for name, size in sizes.items():
        most = {"vocab_size": 2**31 - 1, "seq_len": 2**31 - 1, "num_layers": 4096}.get(name, 2**20)
        if size is not None and size < 1:
            raise ConfigError(f"{what}: {name} is {size}; want 1 or more")
        if size is not None and size > most:
            raise ConfigError(f"{what}: {name} is {size}; want at most {most}")


def check_positions(what: str, seq_len: int, most: int | None) -> None:
    """Raise ConfigError where a model has fewer positions (``max_seq_len``; None: enough) than the sequences it is to read."""
    if most is not None and most < seq_len:
        raise ConfigError(f"{what}: max_seq_len is {most}, and seq_len {seq_len}; want max_seq_len of at least seq_len")


def check_dtype(what: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype that parameters are created in or computed with, by its name or as JAX has it. ``what`` names the
    option.

    Raises:
        ConfigError: jaxpipe can't train in it: it is no dtype, has no loss scaling here (float16), or JAX would compute in
            another one without a word (float64 unless x64 is enabled).
    """
    try:
        resolved: np.dtype[Any] = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # the last two of odd strings
        raise ConfigError(f"{what} is {dtype!r}, which is no dtype; use float32, bfloat16 or float64") from None
    if resolved.name == "float16":
        raise ConfigError(
            f"{what} is float16, which needs loss scaling, and there is none: gradients below 6e-8 would be 0; use bfloat16"
        )
    if resolved.name not in ("float32", "bfloat16", "float64"):
        raise ConfigError(f"{what} is {resolved.name}; use float32, bfloat16 or float64")
    if resolved.name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ConfigError(
            f"{what} is float64, which JAX computes in float32 unless x64 is enabled; set JAX_ENABLE_X64=1, or use float32"
        )
    return resolved.newbyteorder("=")


def _typed(value: Any, hint: Any, what: str) -> Any:
    """Return ``value`` if it fits the annotation ``hint``; an int becomes a float where a float is wanted, a table options."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    record = next((t for t in allowed if isinstance(t, type) and is_dataclass(t)), None)
    if record is not None and isinstance(value, Mapping):
        return build_options(record, value, what)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in [type(None) if t is None else t for t in allowed]:
        names = " or ".join("nothing" if t is types.NoneType else t.__name__ for t in allowed)
        raise ConfigError(f"{what} is {value!r} ({type(value).__name__}); want {names}")
    return value
