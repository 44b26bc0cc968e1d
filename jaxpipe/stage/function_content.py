"""Text that describes what a Python function does, equal in any process: for callbacks, which no jaxpr looks into.

Two functions have equal texts if they have the same bytecode, constants, default values, closures and globals, and so do the
functions that they call by a global name. Line numbers, docstrings and the names of functions do not count. Bytecode differs
between Python versions. Left out is what a function may change while it runs: variables and attributes that its code assigns
to, and what lists, dicts and sets hold. Functions of installed packages count by their names, other than those of the
package that the described function is from.
"""

from __future__ import annotations

import dis
import inspect
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_FOREIGN = ("builtins", "jax", "jaxlib", "numpy", "optax", "flax", "orbax")
"""Packages whose functions always count by their names: their version is another matter, or changes no value."""
_WRITES = ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL")
_STATELESS = ("__init__", "__post_init__", "__new__")
"""Methods that give an object its attributes before any other is called."""


def function_content(function: Any, describe: Callable[[Any], str]) -> str:
    """The text of a function, a method, a partial, or an object that can be called. ``describe``: the text of a value that is
    neither a function nor an object of a class outside of installed packages."""
    return _Content(_package(function), describe).of(function)


class _Content:
    """``package``: whose functions count by what they do, wherever they are installed. Functions met before count by their
    number."""

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
        if id(value) in self._numbers:
            return f"again {self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        return content(value)

    def _function(self, function: FunctionType) -> str:
        if not self._is_own(function):
            return f"<{function.__module__}.{function.__qualname__}>"
        code = function.__code__
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
        own = {name: x for name, x in methods.items() if self._is_own(x)}
        written = {
            name
            for method, x in own.items()
            if method not in _STATELESS
            for name in _written(x.__code__, ("STORE_ATTR",))
        }
        held = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else vars_of(value)
        attributes = ",".join(f"{name}={self.of(x)}" for name, x in sorted(held.items()) if name not in written)
        texts = ",".join(f"{name}={self._numbered(x, self._function)}" for name, x in sorted(own.items()))
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
    """The attributes of an object, those in slots too."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots if name != "__dict__"}, **getattr(value, "__dict__", {})}


def _package(value: Any) -> str:
    function = value.__func__ if isinstance(value, MethodType) else value.func if isinstance(value, partial) else value
    module = getattr(inspect.unwrap(function) if callable(function) else function, "__module__", None)
    return str(module).partition(".")[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """``code``, and that of the functions inside."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _codes(x)


def _names(code: CodeType) -> set[str]:
    return {name for each in _codes(code) for name in each.co_names}


def _written(code: CodeType, operations: tuple[str, ...]) -> set[str]:
    """The names that the code assigns to by these operations."""
    return {i.argval for each in _codes(code) for i in dis.get_instructions(each) if i.opname in operations}


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False
