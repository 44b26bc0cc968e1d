"""Read a compiled GPU program: which products run between the start and the done of each collective, what is only moved.

Works on the text of a scheduled HLO module (``compiled.as_text()``). A product is a call of cuBLAS or of a kernel of JAX's own
(Mosaic), or a fusion around a ``dot`` (Triton); a collective is an asynchronous ``all-reduce``, ``all-gather``,
``reduce-scatter``, ``all-to-all`` or ``collective-permute``. One that XLA marked ``is_sync``, since nothing runs beside it,
counts as not covered, and so does one that is not asynchronous at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_DTYPE_AND_SHAPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_LAYOUT = re.compile(r"\]\{([\d,]*)")
_MOVING = frozenset(
    (
        "parameter",
        "constant",
        "bitcast",
        "reshape",
        "copy",
        "transpose",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
    )
) | {"concatenate", "pad", "tuple", "get-tuple-element"}
"""Operations of a kernel that computes nothing."""
_NO_KERNELS = frozenset(("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"))
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective: ``products`` and ``other_kernels`` (fusions and so on) that run under it. ``whole_bytes``: of the largest
    array that it reads or makes."""

    name: str
    kind: str
    whole_bytes: int
    products: int
    other_kernels: int
    is_sync: bool

    @property
    def covered(self) -> bool:
        return self.products > 0 and not self.is_sync


@dataclass(frozen=True, slots=True)
class Move:
    """A kernel of the entry computation that moves arrays. ``kind``: ``copies``, the axes' order in memory stays;
    ``transposing``, it changes; ``fused``, it changes and the kernel computes, too."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or library call of the entry computation. ``moved_bytes``: of the arrays that it reads, of an array that it only
    slices those of the slices, and of those that it writes; without cuBLAS's scratch."""

    name: str
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    result: str
    op: str
    rest: str


def overlaps(text: str) -> list[Overlap]:
    """Return the collectives of the entry computation, in the order in which they end."""
    products = _product_computations(text)
    flying: dict[str, list[int]] = {}
    started: dict[str, _Instruction] = {}
    results: list[Overlap] = []
    for line in _entry(text):
        kind = _collective_kind(line)
        if kind and line.op.endswith("-start"):
            flying[line.name], started[line.name] = [0, 0], line
        elif kind and line.op.endswith("-done"):
            (start,) = [name for name in flying if re.search(rf"%?{re.escape(name)}[,)]", line.rest)]
            sync = '"is_sync":true' in started[start].rest
            size = _largest(f"{started[start].result} {started[start].rest} {line.result}")
            results.append(Overlap(start, kind, size, *flying.pop(start), is_sync=sync))
        elif kind and line.op in _KINDS:
            results.append(Overlap(line.name, kind, _largest(line.result), 0, 0, is_sync=True))
        elif line.op in ("fusion", "custom-call", "dot"):
            at = 0 if _is_product(line, products) else 1
            for counts in flying.values():
                counts[at] += 1
    return results


def count_products(text: str) -> int:
    """Products of the entry computation."""
    products = _product_computations(text)
    return sum(_is_product(line, products) for line in _entry(text))


def moves(text: str, least: int) -> list[Move]:
    """Kernels that copy or transpose arrays of at least ``least`` elements. Axes of length 1 have no order."""
    computations, entry = _computations(text), list(_entry(text))
    entry_types = {line.name: line.result for line in entry}
    results: list[Move] = []
    for line in entry:
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        if line.op in ("copy", "transpose"):
            body, types = [line], entry_types
        elif line.op == "fusion" and called is not None:
            body = computations[called.group(1)]
            types = {i.name: i.result for i in body}
        else:
            continue
        if _most_elements(line.result) < least:
            continue
        turned = any(_reorders(i, types) for i in body if _most_elements(i.result) >= least)
        if all(i.op in _MOVING for i in body):
            results.append(Move(line.name, "transposing" if turned else "copies"))
        elif turned:
            results.append(Move(line.name, "fused"))
    return results


def kernels(text: str) -> list[Kernel]:
    """Kernels and library calls of the entry computation, in order."""
    computations, entry = _computations(text), list(_entry(text))
    types = {line.name: line.result for line in entry}
    results: list[Kernel] = []
    for line in entry:
        if line.op in _NO_KERNELS:
            continue
        operands = _operands(line.rest)
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        body = computations[called.group(1)] if line.op == "fusion" and called is not None else []
        read = {operand: _bytes(types.get(operand, "")) for operand in operands}
        for parameter in (i for i in body if i.op == "parameter"):
            operand = operands[int(parameter.rest.partition(")")[0])]
            read[operand] = min(read[operand], _read(parameter, body))
        written = re.sub(r"s8\[\d+\]", "", line.result) if "cublas" in line.rest else line.result
        results.append(Kernel(line.name, sum(read.values()) + _bytes(written)))
    return results


def _read(value: _Instruction, body: Sequence[_Instruction]) -> int:
    """Bytes of ``value`` that a fusion reads: all, unless it only slices it."""
    readers = [i for i in body if value.name in _operands(i.rest)]
    if not readers or any(i.op not in ("slice", "dynamic-slice", "bitcast") for i in readers):
        return _bytes(value.result)
    return sum(_read(i, body) if i.op == "bitcast" else _bytes(i.result) for i in readers)


def _operands(rest: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", rest.partition(")")[0])


def float32_adds(text: str, least: int) -> list[str]:
    """Names of the entry computation's kernels, products aside, that add and write float32 arrays of at least ``least``
    elements: sums of weight gradients that no product makes in place."""
    computations, products = _computations(text), _product_computations(text)
    names: list[str] = []
    for line in _entry(text):
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        body = computations[called.group(1)] if line.op == "fusion" and called is not None else [line]
        sizes = [_most_elements(i.result) for i in body if i.op == "add" and i.result.startswith("f32")]
        written = re.findall(r"f32\[[\d,]*\]", line.result)
        is_sum = max(sizes, default=0) >= least and max(map(_most_elements, written), default=0) >= least
        if is_sum and not _is_product(line, products):
            names.append(line.name)
    return names


def custom_calls(text: str) -> list[str]:
    """Targets of the entry computation's custom calls."""
    matches = (re.search(r'custom_call_target="([^"]*)"', line.rest) for line in _entry(text))
    return [match.group(1) for match in matches if match]


def _reorders(line: _Instruction, types: Mapping[str, str]) -> bool:
    """Return whether a copy or transpose changes the order in memory of axes longer than 1."""
    operand = re.match(r"%?([\w.\-]+)", line.rest)
    if line.op not in ("copy", "transpose") or operand is None or operand.group(1) not in types:
        return False
    sizes, result = _axes(line.result)
    _, operand_axes = _axes(types[operand.group(1)])
    permutation = re.search(r"dimensions=\{([\d,]*)\}", line.rest)
    comes_from = [int(n) for n in permutation.group(1).split(",")] if permutation else list(range(len(sizes)))
    long = {comes_from[k] for k, n in enumerate(sizes) if n > 1}
    return [comes_from[k] for k in result if sizes[k] > 1] != [k for k in operand_axes if k in long]


def _axes(typed: str) -> tuple[list[int], list[int]]:
    """Sizes of the first array's axes, and the axes from the fastest in memory to the slowest."""
    shape, layout = _DTYPE_AND_SHAPE.search(typed), _LAYOUT.search(typed)
    sizes = [int(n) for n in shape.group(2).split(",") if n] if shape else []
    order = [int(n) for n in layout.group(1).split(",") if n] if layout else []
    return sizes, order or list(range(len(sizes)))[::-1]


def _most_elements(types: str) -> int:
    """Return the number of elements of the largest array type in the text."""
    return max(
        (math.prod(int(n) for n in shape.split(",") if n) for _, shape in _DTYPE_AND_SHAPE.findall(types)), default=0
    )


def _entry(text: str) -> Iterator[_Instruction]:
    for line in text[text.index("\nENTRY") :].splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            yield _Instruction(*match.groups())


def _computations(text: str) -> dict[str, list[_Instruction]]:
    """Return the instructions of each computation, by its name."""
    bodies: dict[str, list[_Instruction]] = {}
    for line in text.splitlines():
        head, match = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line), _INSTRUCTION.match(line)
        if head:
            bodies[head.group(1)] = body = []
        elif match and bodies:
            body.append(_Instruction(*match.groups()))
    return bodies


def _collective_kind(line: _Instruction) -> str:
    """Return the collective that a line starts, ends or is; "" for others. Some are wrapped: ``async-start(...)
    calls=%wrapped``."""
    where = line.op if not line.op.startswith("async-") else f"{line.name} {line.rest}"
    return next((kind for kind in _KINDS if kind in where), "")


def _product_computations(text: str) -> frozenset[str]:
    """Names of the computations (of fusions) that hold a product."""
    names: set[str] = set()
    name = ""
    for line in text.splitlines():
        head = re.match(r"%?([\w.\-]+) .*\{$", line)
        if head:
            name = head.group(1)
        elif re.search(r" (?:dot|scaled-dot)\(", line):
            names.add(name)
    return frozenset(names)


def _is_product(line: _Instruction, products: frozenset[str]) -> bool:
    if line.op == "custom-call":
        return any(kernel in line.rest for kernel in ("cublas", "cudnn$fmha", "mosaic_gpu"))
    called = re.search(r"calls=%?([\w.\-]+)", line.rest)
    return line.op == "dot" or (called is not None and (called.group(1) in products or "__triton_gemm" in line.rest))


def _largest(types: str) -> int:
    """Bytes of the largest array whose type is written here."""
    return max(_sizes(types), default=0)


def _bytes(types: str) -> int:
    """Bytes of all arrays whose types are written here."""
    return sum(_sizes(types))


def _sizes(types: str) -> list[int]:
    shapes = _DTYPE_AND_SHAPE.findall(types)
    return [math.prod(int(n) for n in shape.split(",") if n) * _BYTES.get(dtype, 4) for dtype, shape in shapes]
