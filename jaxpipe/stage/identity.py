"""When two programs are the same: keys that are equal for jaxprs that compute the same, and differ otherwise.

Stages share compiled code, and optimizers are taken apart by layer, only where these keys agree: names, labels and the identity
of arrays do not count. Variables are numbered as they appear; constants and literals are compared by dtype, shape and bytes;
functions among the parameters of an equation (callbacks) are the same only if they are one object (digests, which outlive
the process, compare what they do: :mod:`jaxpipe.stage.function_content`). Equal keys mean the same
equations in the same order: two spellings of one computation may differ, never two computations agree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import STRUCTURES, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, called_jaxpr, is_key_dtype
from jaxpipe.stage.function_content import function_content

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_BY_VALUE = (str, bytes, np.dtype, type)
_HASHED_WHOLE = (
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
    *STRUCTURES,
)


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal to what holds the very same object, which lives as long as this."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def function_key(function: Callable[..., Any]) -> Hashable:
    """A key that is equal for one function object, or one method of one object."""
    if isinstance(function, MethodType):
        return Same(function.__func__), Same(function.__self__)
    return Same(function)


def jaxpr_key(closed: ClosedJaxpr) -> Hashable:
    """The key of a closed jaxpr, constants compared by value."""
    return _body_key(closed.jaxpr, closed.consts)


def program_digest(closed: ClosedJaxpr, *, by_name: bool = False) -> str:
    """Hexadecimal digits that are equal, in any process under one JAX version, for closed jaxprs that compute the same.

    Weaker than :func:`jaxpr_key` where that compares objects: functions (callbacks) count by what they do
    (:func:`~jaxpipe.stage.function_content.function_content`), other objects by class and what they print without addresses.
    ``by_name``: functions count by module and qualified name, as in checkpoints that have no other digest.
    """
    return hashlib.sha256(_lasting(jaxpr_key(closed), by_name).encode()).hexdigest()


def _lasting(key: Any, by_name: bool) -> str:
    """A key as text that is the same in another process."""
    if isinstance(key, tuple):
        return f"({','.join(_lasting(part, by_name) for part in key)})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(_lasting(part, by_name) for part in key))}}}"
    value = key.value if isinstance(key, Same) else key
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if isinstance(value, FunctionType) and by_name:
        return f"<{value.__module__}.{value.__qualname__}>"
    if isinstance(key, Same) and not by_name:
        return function_content(value, _printed)
    return _printed(value)


def _printed(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer):
        value = array_key(value)
    return f"<{type(value).__qualname__} {_ADDRESS.sub('', repr(value))}>"


def _body_key(jaxpr: Jaxpr, consts: Sequence[Any]) -> Hashable:
    keys = AtomKeys()
    constants = tuple(value_key(c) for c in consts)
    entering = tuple(keys.define(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    body = equations_key(jaxpr.eqns, keys)
    return constants, entering, body, tuple(keys.of(a) for a in jaxpr.outvars)


def equations_key(eqns: Iterable[JaxprEqn], keys: AtomKeys) -> Hashable:
    """The key of equations whose free variables ``keys`` knows; it knows their results afterwards."""
    return tuple(_equation_key(eqn, keys) for eqn in eqns)


def _equation_key(eqn: JaxprEqn, keys: AtomKeys) -> Hashable:
    operands = tuple(keys.of(a) for a in eqn.invars)
    call = called_jaxpr(eqn)
    if call is not None:  # what it is called, and how it would be differentiated, changes no value
        meaning: Hashable = ("call", _body_key(*call))
    else:
        meaning = (eqn.primitive.name, value_key(eqn.params))
    return meaning, operands, tuple(keys.define(v) for v in eqn.outvars)


class AtomKeys:
    """Numbers for variables, in the order in which they are defined; keys of literals by value."""

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}

    def define(self, var: Var) -> Hashable:
        """Number a variable; the key of its type."""
        self._numbers[var] = len(self._numbers)
        return _type_key(var.aval)

    def of(self, atom: Atom) -> Hashable:
        """The key of an operand."""
        if isinstance(atom, Literal):
            return value_key(atom.val), _type_key(atom.aval)
        return self._numbers[atom]


def _type_key(aval: Any) -> Hashable:
    return str(getattr(aval, "dtype", aval)), tuple(getattr(aval, "shape", ()))


def value_key(value: Any) -> Hashable:
    """A key that is equal for equal values: arrays by dtype, shape and bytes, containers by their items, jaxprs by what they
    compute; of anything else, whose equality may leave something out, only for one object."""
    if isinstance(value, ClosedJaxpr):
        return "jaxpr", jaxpr_key(value)
    if isinstance(value, Jaxpr):
        return "jaxpr", _body_key(value, ())
    if value is None or isinstance(value, _BY_VALUE):
        return type(value).__name__, value
    if isinstance(value, bool | int | float | complex | Enum):
        return type(value).__name__, repr(value)  # 1, 1.0 and True are equal as numbers, 0.0 and -0.0 too
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer):
        return array_key(value)
    if isinstance(value, Mapping):
        return "mapping", tuple(
            (value_key(k), value_key(v)) for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))
        )
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(value_key(v) for v in value)
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(str(v) for v in value)), frozenset(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple((f.name, value_key(getattr(value, f.name))) for f in fields(value))
    if isinstance(value, FunctionType | MethodType):
        return function_key(value)
    if isinstance(value, _HASHED_WHOLE):
        return type(value).__name__, value
    return Same(value)


def array_key(value: Any) -> Hashable:
    """The key of an array: typed PRNG keys by their words and implementation."""
    if is_key_dtype(value.dtype):
        return "key", str(value.dtype), array_key(jax.random.key_data(value))
    array = np.asarray(value)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return "array", str(array.dtype), array.shape, hashlib.sha256(raw.data).hexdigest()
