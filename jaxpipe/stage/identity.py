"""When two programs are the same: keys that are equal for jaxprs that compute the same, and differ otherwise.

Stages share compiled code, and optimizers are taken apart by layer, only where these keys agree: names, labels and the identity
of arrays do not count. Variables are numbered as they appear; constants and literals are compared by dtype, shape and bytes;
functions among the parameters of an equation (callbacks) are the same only if they are one object. Equal keys mean the same
equations in the same order: two spellings of one computation may differ, never two computations agree.

Digests (:func:`program_digest`) outlive the process, so they compare functions by what they do (:func:`function_content`). Two
functions have equal texts if they have the same bytecode, constants, default values, closures and globals, and so do the
functions that they call by a global name. Line numbers, docstrings and the names of functions do not count. Bytecode differs
between Python versions. Left out is what a function may change while it runs: variables and attributes that its code assigns
to, and what lists, dicts and sets hold. Functions of installed packages count by their names, other than those of the package
that the described function is from.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from jaxpipe._jax_compat import STRUCTURES, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, called_jaxpr, is_key_dtype

_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_FOREIGN = ("builtins", "jax", "jaxlib", "numpy", "optax", "flax", "orbax")
"""Packages whose functions always count by their names: their version is another matter, or changes no value."""
_WRITES = ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL")
_STATELESS = ("__init__", "__post_init__", "__new__")
"""Methods that give an object its attributes before any other is called."""


def function_content(function: Any, describe: Callable[[Any], str]) -> str:
    """Return the text of a function, a method, a partial, or an object that can be called. ``describe``: the text of a value
    that is neither a function nor an object of a class outside of installed packages."""
    return _Content(_package(function), describe).of(function)


class _Content:
    """Writes the text of a function. ``package``: whose functions count by what they do, wherever they are installed. Functions
    met before count by their number."""

    def __init__(self, package: str, describe: Callable[[Any], str]) -> None:
        self._package, self._describe = package, describe
        self._numbers: dict[int, int] = {}

    def of(self, value: Any) -> str:
        if isinstance(value, MethodType):
            return f"method({self.of(value.__func__)},{self.of(value.__self__)})"
        if isinstance(value, partial):
            keywords = ",".join(f"{name}={self.of(x)}" for name, x in sorted(value.keywords.items()))
            return f"partial({self.of(value.func)},{self._several(value.args)},{keywords})"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return f"<{value.__module__}.{value.__qualname__}>"
        if isinstance(value, tuple | frozenset):
            return f"{type(value).__name__}({self._several(value)})"
        if isinstance(value, list | dict | set):
            return type(value).__name__
        wrapped = inspect.unwrap(value) if callable(value) else value
        if isinstance(wrapped, FunctionType):
            return self._numbered(wrapped, self._function)
        if self._is_own(type(wrapped)):
            return self._numbered(wrapped, self._object)
        return self._describe(wrapped)

    def _several(self, values: Any) -> str:
        texts = [self.of(x) for x in values]
        return ",".join(sorted(texts) if isinstance(values, frozenset) else texts)

    def _numbered(self, value: Any, content: Callable[[Any], str]) -> str:
        # Recursion, and functions that call each other, would never end.
        if id(value) in self._numbers:
            return f"again {self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        return content(value)

    def _function(self, function: FunctionType) -> str:
        if not self._is_own(function):
            return f"<{function.__module__}.{function.__qualname__}>"
        code = function.__code__
        # A counter that the function increments would give it another text after each call.
        written = _written(code, _WRITES)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        bound = {name: cell.cell_contents for name, cell in cells if name not in written and not _is_empty(cell)}
        read = {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
        around = {**bound, **{f"global {name}": x for name, x in read.items() if name not in written}}
        values = ",".join(f"{name}={self.of(x)}" for name, x in sorted(around.items()))
        defaults = self._several((function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())))
        return f"function({self._code(code, function.__doc__)},{defaults},{values})"

    def _code(self, code: CodeType, doc: str | None) -> str:
        constants = ",".join(
            self._code(x, None) if isinstance(x, CodeType) else "" if x == doc and doc else self.of(x)
            for x in code.co_consts
        )
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return f"code({code.co_code.hex()},{code.co_exceptiontable.hex()},{code.co_names},{counts},{constants})"

    def _object(self, value: Any) -> str:
        kind = type(value)
        methods = {name: x for name, x in inspect.getmembers_static(kind) if isinstance(x, FunctionType)}
        own_methods = {name: x for name, x in methods.items() if self._is_own(x)}
        written = {
            name
            for method, x in own_methods.items()
            if method not in _STATELESS
            for name in _written(x.__code__, ("STORE_ATTR",))
        }
        held = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else vars_of(value)
        attributes = ",".join(f"{name}={self.of(x)}" for name, x in sorted(held.items()) if name not in written)
        texts = ",".join(f"{name}={self._numbered(x, self._function)}" for name, x in sorted(own_methods.items()))
        return f"object({kind.__qualname__},{attributes},{texts})"

    def _is_own(self, value: Any) -> bool:
        """Whether a function or class is of the package described, or of none that is installed."""
        package = _package(value)
        if package == self._package:
            return package not in _FOREIGN
        module = inspect.getmodule(value)
        file = getattr(module, "__file__", None)
        return file is not None and not any(place in file for place in _INSTALLED)


def vars_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, those in slots too."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots if name != "__dict__"}, **getattr(value, "__dict__", {})}


def _package(value: Any) -> str:
    function = value.__func__ if isinstance(value, MethodType) else value.func if isinstance(value, partial) else value
    module = getattr(inspect.unwrap(function) if callable(function) else function, "__module__", None)
    return str(module).partition(".")[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code``, and that of the functions inside."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _names(code: CodeType) -> set[str]:
    return {name for each in _codes(code) for name in each.co_names}


def _written(code: CodeType, operations: tuple[str, ...]) -> set[str]:
    """Return the names that the code assigns to by these operations."""
    return {i.argval for each in _codes(code) for i in dis.get_instructions(each) if i.opname in operations}


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


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
class ById:
    """A key that is equal for the very same object only. It keeps the object alive, so that its id is not used again."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def function_key(function: Callable[..., Any]) -> Hashable:
    """Return a key that is equal for one function object, or one method of one object."""
    # Each access to a method makes a new object, so the function and the instance are compared.
    if isinstance(function, MethodType):
        return ById(function.__func__), ById(function.__self__)
    return ById(function)


def jaxpr_key(closed: ClosedJaxpr) -> Hashable:
    """Return the key of a closed jaxpr, constants compared by value."""
    return _body_key(closed.jaxpr, closed.consts)


def program_digest(closed: ClosedJaxpr, *, by_name: bool = False) -> str:
    """Return hexadecimal digits that are equal, in any process under one JAX version, for closed jaxprs that compute the same.

    Weaker than :func:`jaxpr_key` where that compares objects: functions (callbacks) count by what they do
    (:func:`~jaxpipe.stage.identity.function_content`), other objects by class and what they print without addresses.
    ``by_name``: functions count by module and qualified name, as in checkpoints that have no other digest.
    """
    return hashlib.sha256(_lasting(jaxpr_key(closed), by_name).encode()).hexdigest()


def _lasting(key: Any, by_name: bool) -> str:
    """Write a key as text that is the same in another process."""
    if isinstance(key, tuple):
        return f"({','.join(_lasting(part, by_name) for part in key)})"
    # The order of a set differs from process to process.
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(_lasting(part, by_name) for part in key))}}}"
    value = key.value if isinstance(key, ById) else key
    if isinstance(value, type):
        return f"<{value.__module__}.{value.__qualname__}>"
    if isinstance(value, FunctionType) and by_name:
        return f"<{value.__module__}.{value.__qualname__}>"
    if isinstance(key, ById) and not by_name:
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
    """Return the key of equations whose free variables ``keys`` knows; it knows their results afterwards."""
    return tuple(_equation_key(eqn, keys) for eqn in eqns)


def _equation_key(eqn: JaxprEqn, keys: AtomKeys) -> Hashable:
    operands = tuple(keys.of(a) for a in eqn.invars)
    call = called_jaxpr(eqn)
    # What a call is named, and how it would be differentiated, changes no value.
    if call is not None:
        meaning: Hashable = ("call", _body_key(*call))
    else:
        meaning = (eqn.primitive.name, value_key(eqn.params))
    return meaning, operands, tuple(keys.define(v) for v in eqn.outvars)


class AtomKeys:
    """Numbers variables in the order in which they are defined; literals have keys by value."""

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}

    def define(self, var: Var) -> Hashable:
        """Number a variable, and return the key of its type."""
        self._numbers[var] = len(self._numbers)
        return _type_key(var.aval)

    def of(self, atom: Atom) -> Hashable:
        """Return the key of an operand."""
        if isinstance(atom, Literal):
            return value_key(atom.val), _type_key(atom.aval)
        return self._numbers[atom]


def _type_key(aval: Any) -> Hashable:
    return str(getattr(aval, "dtype", aval)), tuple(getattr(aval, "shape", ()))


def value_key(value: Any) -> Hashable:
    """Return a key that is equal for equal values: arrays by dtype, shape and bytes, containers by their items, jaxprs by what
    they compute; for anything else, whose equality may leave something out, only for one object."""
    if isinstance(value, ClosedJaxpr):
        return "jaxpr", jaxpr_key(value)
    if isinstance(value, Jaxpr):
        return "jaxpr", _body_key(value, ())
    if value is None or isinstance(value, _BY_VALUE):
        return type(value).__name__, value
    if isinstance(value, bool | int | float | complex | Enum):
        # By text: 1, 1.0 and True are equal as numbers, 0.0 and -0.0 too, and NaN is not equal to itself.
        return type(value).__name__, repr(value)
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
    return ById(value)


def array_key(value: Any) -> Hashable:
    """Return the key of an array: typed PRNG keys by their words and implementation."""
    if is_key_dtype(value.dtype):
        return "key", str(value.dtype), array_key(jax.random.key_data(value))
    array = np.asarray(value)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return "array", str(array.dtype), array.shape, hashlib.sha256(raw.data).hexdigest()
