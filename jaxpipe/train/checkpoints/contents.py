"""One checkpoint on disk: a folder of arrays by layer name, a JSON file that describes them, and checksums of both.

A checkpoint folder holds::

    params/           Orbax (OCDBT) tree {layer: {name: array}}; readable with Orbax alone
    optimizer/        the same for the optimizer state
    extra/            the same for more trees by name, if any were given
    checkpoint.json   step, evaluation loss, the caller's ``meta``, and per leaf its path, shape, dtype and SHA-256
    SHA256SUMS        one line per file, as ``sha256sum -c SHA256SUMS`` reads it

Of several processes each writes all this, with its own layers, into ``part0/``, ``part1/``, …; the first then adds a
``checkpoint.json`` of all leaves, which says of each in which parts its pieces are (:mod:`~jaxpipe.train.checkpoints.leaves`),
and a ``SHA256SUMS`` of all files.

Orbax 0.12 loads flipped bits without noticing, so files are compared with their checksums, and arrays with those of what was
in memory when they were saved. A file is read once for both: arrays lie in it as they do in memory. Those of up to 1 MiB alone,
in which the nodes of Orbax's trees are, are compared before they are decoded. Of a larger one that has arrays for others, too,
a process reads and compares its own arrays. What was written with compression is compared whole, and decoded after that.
Nothing is pickled, and nothing in ``checkpoint.json`` is believed: what is read has the types and shapes that
:func:`manifest_text` writes, or is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoints.leaves import Leaf, LeafKey, Piece, Ranges, Snapshot, dtype_of
from jaxpipe.train.checkpoints.orbax_trees import read_tree, stored_values, write_tree

FORMATS = (1, 2, 3)
"""Format numbers: a checkpoint that one process has written, one of the parts of several, and one with leaves in pieces. A
manifest has the first that can hold it, so that older versions read it."""
NEEDED = ("params", "optimizer")
GROUPS = (*NEEDED, "extra")

_LARGEST = 10**18
_MOST_ELEMENTS = 2**48
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``checkpoint.json``. ``layers`` and ``leaves`` are by group: "params", "optimizer", perhaps "extra".

    ``eval_loss`` is finite or None. ``version``: of the jaxpipe that wrote it.
    """

    step: int
    eval_loss: float | None
    meta: dict[str, Any]
    version: str
    layers: Mapping[str, tuple[str, ...]]
    leaves: Mapping[str, tuple[Leaf, ...]]


class OtherFormatError(CheckpointError):
    """The manifest is of a format that this version does not read."""


def manifest_text(manifest: Manifest) -> str:
    """Return the text of ``checkpoint.json``."""
    pieces = [piece for leaves in manifest.leaves.values() for leaf in leaves for piece in leaf.pieces]
    body = {
        "format": FORMATS[max((2 if x.ranges else int(x.part is not None) for x in pieces), default=0)],
        "jaxpipe": manifest.version,
        "step": manifest.step,
        "eval_loss": manifest.eval_loss,
        "meta": manifest.meta,
        "layers": manifest.layers,
    }
    # A line for each leaf, which a person can look for; indented in full, as many pieces take ten times as long to write.
    lines = {
        group: ",\n".join(json.dumps(_leaf_to_json(leaf)) for leaf in leaves)
        for group, leaves in manifest.leaves.items()
    }
    listed = ",\n".join(f"{json.dumps(group)}: [\n{text}\n]" for group, text in lines.items())
    return f'{json.dumps(body, indent=1, allow_nan=False)[:-2]},\n "leaves": {{\n{listed}\n}}\n}}\n'


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest in the bytes of ``checkpoint.json``.

    Raises:
        ValueError: they are not what jaxpipe writes; says in a few words what is wrong.
        OtherFormatError: another version wrote them.
    """
    odd: list[str] = []

    def constant(name: str) -> float:
        odd.append(name)
        return math.nan

    try:
        body: Any = json.loads(data, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if type(body) is not dict or type(body.get("format")) is not int:
        raise ValueError("it has no format number")
    if body["format"] not in FORMATS:
        raise OtherFormatError(
            f"has format {body['format']}, written by jaxpipe {body.get('jaxpipe')}; this is jaxpipe {__version__}, which "
            f"reads formats {' and '.join(map(str, FORMATS))}; install the version that wrote it"
        )
    fields: list[Any] = [body.get(key) for key in ("step", "eval_loss", "meta", "jaxpipe")]
    step, loss, meta, version = fields
    for key, fits in {
        "step": type(step) is int and 0 <= step < _LARGEST,
        "eval_loss": loss is None or type(loss) is float or (type(loss) is int and abs(loss) < _LARGEST),
        "meta": type(meta) is dict,
        "jaxpipe": type(version) is str,
    }.items():
        if not fits:
            raise ValueError(f"its {key} is {body.get(key, 'missing')!r:.60}")
    finite = loss is not None and math.isfinite(loss)
    if odd[1 if loss is not None and not finite else 0 :]:  # jaxpipe 0.1.0 wrote the loss so where it was not finite
        raise ValueError(f"it holds {odd[-1]}, which is not JSON")
    return Manifest(step, loss if finite else None, meta, version, *_groups(body))


def merged(parts: Sequence[bytes]) -> Manifest:
    """Return the manifest of a whole checkpoint, from the bytes of those that processes have written of their parts. Of arrays
    that several have, the first counts.

    Raises:
        ValueError: two have different arrays under one name, or elements of one are in no part.
    """
    # On JSON: 1,000 parts have 200,000 pieces of a few leaves, which are checked once. What is kept of a piece are tuples of
    # numbers and text, which Python's garbage collector does not visit again and again.
    layers: dict[str, dict[str, None]] = {}
    leaves_of: dict[str, dict[str, tuple[dict[str, Any], dict[Ranges, tuple[int, str]]]]] = {}
    for number, body in enumerate(map(json.loads, parts)):
        for group, records in body["leaves"].items():
            layers.setdefault(group, {}).update(dict.fromkeys(body["layers"][group]))
            leaves = leaves_of.setdefault(group, {})
            for record in records:
                pieces = record.pop("pieces", None) or [{"sha256": record.pop("sha256")}]
                first, pieces_of = leaves.setdefault(f"{record['layer']} {record['path']}", (record, {}))
                for piece in pieces:
                    mine = number, piece["sha256"]
                    other = pieces_of.setdefault(tuple(map(tuple, piece.get("ranges", ()))), mine)
                    if other[1] != mine[1] or first != record:
                        owner = next(n for n, _ in (other, *pieces_of.values()) if n != number)
                        name = _leaf_from_json({**record, **_with_pieces([piece])}).name
                        raise ValueError(f"{group}: {name} of process {number} is not that of process {owner}")

    def records_of(group: str) -> Iterator[dict[str, Any]]:
        for record, pieces_of in leaves_of[group].values():
            listed = [
                {"ranges": ranges, "part": part, "sha256": digest} if ranges else {"part": part, "sha256": digest}
                for ranges, (part, digest) in pieces_of.items()
            ]
            yield {**record, **_with_pieces(listed)}

    group_layers, all_leaves = _groups({"layers": layers, "leaves": {group: records_of(group) for group in leaves_of}})
    for group, group_leaves in all_leaves.items():
        if problem := next(filter(None, (leaf.problem for leaf in group_leaves)), ""):
            raise ValueError(f"{group}: {problem}")
    return replace(parse_manifest(parts[0]), layers=group_layers, leaves=all_leaves)


def _with_pieces(pieces: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {"pieces": pieces} if "ranges" in pieces[0] else pieces[0]


def strict_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` as JSON gives it back, a deep copy; raises CheckpointError for what JSON can't hold, NaN among it."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"meta can't be stored as JSON: {error}; convert it to finite numbers, strings, lists and dicts"
        ) from error
    return values


def _groups(body: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Leaf, ...]]]:
    try:
        layers = {group: tuple(names) for group, names in body["layers"].items()}
        leaves = {group: tuple(_leaf_from_json(x) for x in records) for group, records in body["leaves"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its layers or leaves can't be read ({type(error).__name__}: {error})") from None
    are_names = all(type(name) is str for names in layers.values() for name in names)
    if not (are_names and layers.keys() == leaves.keys() >= set(NEEDED)):
        raise ValueError(f"its layers or leaves are not by {', '.join(NEEDED)}")
    for group, group_leaves in leaves.items():
        if stray := [leaf.name for leaf in group_leaves if leaf.layer not in layers[group]]:
            raise ValueError(f"its {group} have a leaf {stray[0]:.60} of no layer")
    return layers, leaves


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": leaf.layer, "path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype}
    if leaf.python is not None:
        record["python"] = leaf.python
    if leaf.split is not None:
        record["split"] = leaf.split
    pieces = [_piece_to_json(piece) for piece in leaf.pieces]
    return {**record, **_with_pieces(pieces)}


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    record: dict[str, Any] = {} if piece.part is None else {"part": piece.part}
    if piece.ranges:
        record["ranges"] = piece.ranges
    return {**record, "sha256": piece.sha256}


def _leaf_from_json(record: Mapping[str, Any]) -> Leaf:
    path = tuple((kind, key) for kind, key in record["path"])
    shape = tuple(record["shape"])
    split = None if record.get("split") is None else tuple(record["split"])
    in_pieces = "pieces" in record
    pieces = tuple(_piece_from_json(piece) for piece in (record["pieces"] if in_pieces else [record]))
    leaf = Leaf(record["layer"], path, shape, record["dtype"], record.get("python"), split, pieces)
    named = type(leaf.layer) is str and leaf.python in (None, "bool", "int", "float")
    sized = all(type(size) is int and size >= 0 for size in shape)
    steps = all(kind in ("key", "index", "field") and type(key) in (str, int) for kind, key in path)
    if not (named and sized and steps and leaf.storage_keys):  # which are text that UTF-8 can hold, or raise
        raise ValueError(f"a leaf is {record!r:.60}")
    if math.prod(size for size in shape if size) > _MOST_ELEMENTS or dtype_of(leaf.dtype).name != leaf.dtype:
        raise ValueError(f"a leaf has shape {shape!r:.60} and dtype {leaf.dtype!r:.20}")
    divided = split is None or (
        [type(number) for number in split] == [int, int]
        and 0 <= split[0] < len(shape)
        and split[1] > 0
        and shape[split[0]] % split[1] == 0
    )
    size, ranges = leaf.size, [span for piece in pieces for span in piece.ranges]
    inside = all(start >= 0 and stop <= size for start, stop in ranges)
    if not (divided and pieces and inside and all(bool(piece.ranges) == in_pieces for piece in pieces)):
        raise ValueError(f"the pieces of {leaf.name:.60} are {record.get('pieces')!r:.60}, split {split!r:.20}")
    return leaf


def _piece_from_json(record: Mapping[str, Any]) -> Piece:
    ranges = tuple(map(tuple, record.get("ranges", ())))
    piece = Piece(record.get("part"), ranges, record["sha256"])
    counted = all(type(start) is type(stop) is int and start < stop for start, stop in ranges)
    written = piece.part is None or (type(piece.part) is int and 0 <= piece.part < _LARGEST)
    if not (counted and written and _SHA256.fullmatch(piece.sha256)):
        raise ValueError(f"a piece is {record!r:.60}")
    return piece


MANIFEST = "checkpoint.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n]*)")
_PART = re.compile("part[0-9]{1,9}")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint folder is incomplete, truncated or altered; another step may be intact."""


class UnreadableCheckpointError(CheckpointError):
    """The system can't read a file of a checkpoint now; the checkpoint may be intact."""


class RemovedCheckpointError(CheckpointError):
    """A checkpoint was removed or replaced while it was being read."""


def write_checkpoint(
    folder: Path, step: int, eval_loss: float | None, meta: dict[str, Any], groups: Mapping[str, Snapshot]
) -> None:
    """Write one checkpoint into the new folder ``folder``, flush it to disk, and compare what Orbax reads back with what was
    to be written. Raises OSError, DamagedCheckpointError and what Orbax raises."""
    folder.mkdir(parents=True)
    for group, content in groups.items():
        _write_arrays(folder / group, content)
    manifest = Manifest(
        step,
        eval_loss,
        meta,
        __version__,
        {group: content.layers for group, content in groups.items()},
        {
            group: tuple(_with_digest(leaf, array) for leaf, array in content.pairs())
            for group, content in groups.items()
        },
    )
    # The order matters: arrays, then what they are, then checksums of all, each flushed; a kill in between leaves no
    # SHA256SUMS. Read back before the manifest says that they are there: what Orbax has written wrongly must never
    # count, as older checkpoints are removed for this one.
    for group, leaves in manifest.leaves.items():
        if pieces := [(leaf, leaf.pieces[0]) for leaf in leaves if leaf.size]:
            _decoded(folder, group, pieces, whole=True)
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    _write_sums(folder, {name: _file_sha256(folder / name, flush=True) for name in _file_names(folder)})
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_directory(directory)


def part_of(folder: Path, process: int) -> Path:
    """Return the folder that a process writes its part of a checkpoint into, with :func:`write_checkpoint`."""
    return folder / f"part{process}"


def join_parts(folder: Path, number: int) -> None:
    """Make one checkpoint of ``number`` parts, which have been written and flushed.

    Raises:
        ValueError: they don't fit together.
        CheckpointError: one can't be read.
    """
    parts = [part_of(folder, process) for process in range(number)]
    sums: dict[str, str] = {}
    for part in parts:
        sums |= {f"{part.name}/{name}": digest for name, digest in _read_sums(part).items()}
        sums[f"{part.name}/{SUMS}"] = _file_sha256(part / SUMS)
    manifest = merged([_manifest_bytes(part) for part in parts])
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    _write_sums(folder, sums | {MANIFEST: _file_sha256(folder / MANIFEST, flush=True)})
    flush_directory(folder)


def verify_files(folder: Path, places: Collection[str] = ()) -> None:
    """Compare the files of a checkpoint with their checksums, but those in ``places``, such as ``part0/params``; decode
    nothing. Files of others are ignored.

    Raises:
        DamagedCheckpointError: a file is missing or does not match.
        UnreadableCheckpointError: the system refuses to read one.
    """
    _compare(folder, {name: digest for name, digest in _read_sums(folder).items() if _place(name) not in places})


def read_manifest_of(folder: Path) -> Manifest:
    """Read ``checkpoint.json`` after comparing it with its checksum. Raises CheckpointError, as :func:`verify_files` does."""
    try:
        return parse_manifest(_manifest_bytes(folder))
    except OtherFormatError as error:
        raise OtherFormatError(f"checkpoint {folder} {error}") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}") from None


def _manifest_bytes(folder: Path) -> bytes:
    expected = _read_sums(folder)[MANIFEST]
    with _opened(folder, MANIFEST) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != expected:
        raise _mismatch(folder, MANIFEST, len(data))
    return data


_Stored = tuple[Leaf, Piece]


def read_pieces(
    folder: Path,
    group: str,
    leaves: Sequence[Leaf],
    parts: Collection[int | None] | None = None,
    others: Sequence[Leaf] = (),
) -> list[list[np.ndarray | None]]:
    """Return for each leaf of one group the arrays of its pieces, each compared with its checksum; None for those in other
    ``parts``. The files that have them are compared with theirs while they are read, but those above 1 MiB of parts that have
    ``others``, too: leaves that are not read.

    Raises DamagedCheckpointError, also where pieces are missing, and UnreadableCheckpointError.
    """
    if problem := next(filter(None, (leaf.problem for leaf in leaves)), ""):
        raise DamagedCheckpointError(f"checkpoint {folder} is incomplete: {group}: {problem}")
    pieces_of: dict[int | None, list[_Stored]] = {}
    for leaf in leaves:
        for piece in leaf.pieces if leaf.size else ():  # Orbax stores no array without elements
            if parts is None or piece.part in parts:
                pieces_of.setdefault(piece.part, []).append((leaf, piece))
    shared = {piece.part for leaf in others for piece in leaf.pieces}
    sums_of: dict[str, dict[str, str]] = {}
    for file, digest in _read_sums(folder).items():
        sums_of.setdefault(_place(file), {})[file] = digest
    arrays: dict[tuple[LeafKey, Piece], np.ndarray] = {}
    for part, pieces in pieces_of.items():
        name = name_of(part, group)
        read = _read_part(folder, name, pieces, sums_of.get(name, {}), whole=part not in shared)
        arrays |= zip([(leaf.key, piece) for leaf, piece in pieces], read, strict=True)
    return [
        [arrays.get((leaf.key, x)) if leaf.size else np.zeros(leaf.shape, leaf.numpy_dtype) for x in leaf.pieces]
        for leaf in leaves
    ]


_SMALL = 2**20
"""Files up to so many bytes are compared before anything in them is decoded."""


def _read_part(
    folder: Path, name: str, pieces: Sequence[_Stored], sums: Mapping[str, str], *, whole: bool
) -> list[np.ndarray]:
    """Return the arrays of ``pieces``, which lie in the folder ``name``; ``sums``: checksums of its files. ``whole``: they are
    all that is there."""
    large = _compare(folder, sums, _SMALL)
    values = _from_orbax(folder, name, stored_values)
    arrays: list[np.ndarray] = []
    spans_of: dict[str, list[tuple[int, np.ndarray]]] = {file_name: [] for file_name in large} if whole else {}
    for leaf, piece in pieces:
        value, shape = values.get(".".join(leaf.storage_keys), b""), leaf.stored_shape(piece)
        file, first, size = (None, 0, len(value)) if isinstance(value, bytes) else (f"{name}/{value[0]}", *value[1:])
        if size != math.prod(shape) * leaf.numpy_dtype.itemsize or (file and file not in sums):
            _compare(folder, large)
            return _decoded(folder, name, pieces, whole=whole)
        arrays.append(np.empty(shape, leaf.numpy_dtype))
        data = arrays[-1].reshape(-1).view(np.uint8)
        if file:
            spans_of.setdefault(file, []).append((first, data))
        else:
            data[:] = np.frombuffer(value, np.uint8)
    for file, spans in spans_of.items():
        _fill(folder, file, spans, large.get(file, "") if whole else "")
    for (leaf, piece), array in zip(pieces, arrays, strict=True):
        _check_array(folder, name, leaf, piece, array)
    return arrays


def _fill(folder: Path, name: str, spans: Sequence[tuple[int, np.ndarray]], expected: str) -> None:
    """Read arrays of bytes at these places of a file, front to back; with the checksum ``expected`` what lies between, too."""
    digest = hashlib.sha256()
    with _opened(folder, name) as file:
        for first, data in sorted(spans, key=lambda span: span[0]):
            if expected:
                _update(digest, file, first)
            else:
                file.seek(first)
            file.readinto(data.data)  # where the file ends before, what is in the array does not match
            digest.update(data.data if expected else b"")
        if expected:
            _update(digest, file)
            if digest.hexdigest() != expected:
                raise _mismatch(folder, name, file.tell())


def _update(digest: Any, file: BufferedReader, stop: float = math.inf) -> None:
    """Read on to ``stop``, or the end."""
    while block := file.read(int(max(min(stop - file.tell(), _SMALL), 0))):
        digest.update(block)


def _decoded(folder: Path, name: str, pieces: Sequence[_Stored], *, whole: bool) -> list[np.ndarray]:
    """Return the arrays of ``pieces`` as Orbax reads them. ``whole``: they are all that is there."""
    only = None if whole else _nested((leaf, 0) for leaf, _ in pieces)
    tree = _from_orbax(folder, name, lambda place: read_tree(place, only))
    arrays = []
    for leaf, piece in pieces:
        node = tree
        for key in leaf.storage_keys:
            node = node.get(key) if isinstance(node, dict) else None
        arrays.append(np.asarray(node))
        _check_array(folder, name, leaf, piece, arrays[-1])
    return arrays


def _check_array(folder: Path, name: str, leaf: Leaf, piece: Piece, array: np.ndarray) -> None:
    fits = (array.shape, array.dtype.name) == (leaf.stored_shape(piece), leaf.dtype)
    if not fits or _array_sha256(array) != piece.sha256:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: {name}: {leaf.name} is not the array that was saved"
        )


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Around reading ``folder``: what looks like damage because it was removed or replaced meanwhile (by the run that saves
    there) is a RemovedCheckpointError."""
    before = _identity(folder)
    try:
        yield
    except DamagedCheckpointError as error:
        if before is None or _identity(folder) != before:
            raise RemovedCheckpointError(
                f"checkpoint {folder} was removed while being read, as a run removes old ones; read a newer one, or raise "
                "run.keep_last"
            ) from error
        raise


def short_reason(error: BaseException) -> str:
    """Return an error in one line of at most 300 characters; of TensorStore's, the part that says what happened."""
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0] or type(error).__name__
    if "No space left on device" in text:
        return "no space left on device"
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"


def flush_directory(directory: Path) -> None:
    """Make new names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[BufferedReader]:
    """A file of a checkpoint, to be read."""
    with _system_errors(folder, name):
        # Reading a pipe would never end.
        if not stat.S_ISREG((folder / name).stat().st_mode):
            raise FileNotFoundError
        with (folder / name).open("rb") as file:
            yield file


@contextmanager
def _system_errors(folder: Path, name: str) -> Iterator[None]:
    """Errors of the system as ours: what is not there is damage, what can't be read now is not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: no file can have such a name
        raise DamagedCheckpointError(f"checkpoint {folder} is incomplete: {name} is missing") from error
    except OSError as error:
        raise UnreadableCheckpointError(
            f"checkpoint {folder} can't be read now: {name}: {error.strerror}; make it readable and try again, or move the "
            "folder away to do without it"
        ) from error


def _compare(folder: Path, sums: Mapping[str, str], most: float = math.inf) -> dict[str, str]:
    """Compare files with their checksums, but return those of more than ``most`` bytes."""
    large = {}
    for name, expected in sums.items():
        with _opened(folder, name) as file:
            if os.fstat(file.fileno()).st_size > most:
                large[name] = expected
            elif hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise _mismatch(folder, name, file.tell())
    return large


def _mismatch(folder: Path, name: str, size: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"checkpoint {folder} is damaged: {name} ({size} bytes) does not match its checksum (truncated or altered since it "
        "was saved)"
    )


def _with_digest(leaf: Leaf, array: np.ndarray) -> Leaf:
    return replace(leaf, pieces=(replace(leaf.pieces[0], sha256=_array_sha256(array)),))


def _array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _file_sha256(path: Path, flush: bool = False) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return digest


def _file_names(folder: Path) -> list[str]:
    """Return every file below ``folder`` but its SHA256SUMS, relative and with forward slashes; the manifest comes last."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted((name for name in files if name != SUMS), key=lambda name: (name == MANIFEST, name))


def names_in(folder: Path) -> set[str]:
    """Return names of what lies directly in a checkpoint. Raises CheckpointError."""
    with _system_errors(folder, "the folder"):
        return {path.name for path in folder.iterdir()}


def _read_sums(folder: Path) -> dict[str, str]:
    """Return checksums by file name."""
    with _opened(folder, SUMS) as file:
        data = file.read()
    *lines, rest = data.decode("utf-8", "replace").split("\n")
    sums = {}
    for line in lines:
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has the line {line[:90]!r}")
        sums[match[2]] = match[1]
    # The manifest's line is written last: without it, or with half a line behind it, the file is not all there.
    if rest or next(reversed(sums), None) != MANIFEST:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has lost its end")
    return sums


def _write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """``sums``: checksums by file name, the manifest's last."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
    _file_sha256(folder / SUMS, flush=True)


def name_of(part: int | None, group: str) -> str:
    return group if part is None else f"part{part}/{group}"


def _place(name: str) -> str:
    """Return the group that a file is in, with its part; of a file in none its own name."""
    first, *rest = name.split("/")
    return "/".join([first, *rest[:1]]) if _PART.fullmatch(first) else first


def _nested(values: Iterable[tuple[Leaf, Any]]) -> dict[str, Any]:
    """Return the Orbax tree with these values."""
    tree: dict[str, Any] = {}
    for leaf, value in values:
        node = tree
        *parents, last = leaf.storage_keys
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _write_arrays(folder: Path, content: Snapshot) -> None:
    if tree := _nested((leaf, array) for leaf, array in content.pairs() if array.size):
        write_tree(folder, tree)


def _from_orbax(folder: Path, name: str, read: Callable[[Path], Any]) -> Any:
    try:
        return read(folder / name)
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: Orbax can't read {name}: {short_reason(error)}"
        ) from error
