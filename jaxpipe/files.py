"""Files that users name: read with one clear line for what is wrong, written whole or not at all, JSON read strictly; and what
is closed at the end of a block."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from jaxpipe.errors import ConfigError, JaxpipeError, ScheduleError, ScheduleParseError

_T = TypeVar("_T")
_Arguments = ParamSpec("_Arguments")
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def located(where: object, make: Callable[_Arguments, _T], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _T:
    """Call ``make(…)``, whose ScheduleError becomes a ScheduleParseError that begins with ``where``."""
    try:
        return make(*args, **kwargs)
    except ScheduleError as error:
        raise ScheduleParseError(f"{where}: {error}", error.problems) from None


def read_file(path: Path) -> bytes:
    """Return the content of ``path``.

    Raises:
        OSError: as ``Path.read_bytes``; also for pipes, sockets and devices, which may never end.
    """
    if not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe, socket or device; copy it to a file first", str(path))
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the content of ``path`` as UTF-8 text.

    Raises:
        ScheduleParseError: it can't be read, or is not UTF-8; names the line.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ScheduleParseError(f"can't read {path}: not a regular file; give the path of one")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ScheduleParseError(f"can't read {path}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise ScheduleParseError(
            f"{path}: line {line}: not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {error.start}); "
            "is this the right file? Save it as UTF-8"
        ) from None
    except ValueError as error:  # a null byte in the path
        raise ScheduleParseError(f"can't read {str(path)!r}: {error}; check the path") from None


def write_atomically(path: Path, text: str) -> None:
    """Write beside ``path``, then move into place: a reader sees the old file or the new one.

    Raises:
        ScheduleError: the folder is missing or can't be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            # Half of a surrogate pair, as in names of files, is written as JSON writes it, backslash and all.
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
            # mkstemp lets only this user read; a plain ``open`` would have followed the umask, which can only be read by
            # setting it.
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise
    except OSError as error:
        raise ScheduleError(
            f"can't write {path}: {error.strerror or error}; give a file in a folder you may write to"
        ) from None


def not_url(text: str) -> str:
    """Return what is wrong with a path that is a URL; a check of settings. pathlib makes one slash of two: ``gs:/b`` is one
    as well."""
    return (
        "a URL; jaxpipe reads and writes local files only: copy or mount it, and give its path"
        if _URL.match(text)
        else ""
    )


def check_local(path: str | os.PathLike[str], name: str) -> None:
    """Raise ConfigError if ``path``, which messages call ``name``, is a URL."""
    if wrong := not_url(os.fspath(path)):
        raise ConfigError(f"{name} {path} is {wrong}")


def hub_advice(path: str | os.PathLike[str], kind: str = "model") -> str:
    """Return advice if ``path`` does not exist and could be the name of a model or dataset on the Hugging Face hub."""
    if _HUB_ID.fullmatch(os.fspath(path)) is None:
        return ""
    command = f"hf download {path}{'' if kind == 'model' else f' --repo-type {kind}'} --local-dir DIR"
    return f"; if it is a {kind} on the Hugging Face hub, download it ({command}) and give DIR"


def check_one_line(text: str, name: str) -> None:
    """Refuse ``text``, which messages call ``name``, for a file of lines that another program reads: a control character or a
    line break in it could become a command, a directive or a key there, and half of a surrogate pair can't be written.

    Raises:
        ConfigError: it holds one; says which, and where.
    """
    for place, character in enumerate(text):
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or ord(character) & 0xFFFE == 0xFFFE:
            raise ConfigError(
                f"{name} {ascii(text)[:60]} holds {character!a} at character {place}: leave it out, a line can't hold it"
            )


def no_constant(constant: str) -> float:
    """Refuse NaN and Infinity, for ``json.loads(parse_constant=)``."""
    raise ValueError(f'{constant} is not JSON; write "inf" for no limit')


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and refuse repeated keys, as TOML does, for ``json.loads(object_pairs_hook=)``."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return data


class Closing:
    """A context that ends with :meth:`close`; where the block has raised, what that raises becomes a note of the error."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except JaxpipeError as failed:
            if error is None:
                raise
            error.add_note(f"also: {failed}")


def user_cache() -> Path:
    """Return the folder for caches: ``$XDG_CACHE_HOME/jaxpipe``, else ``~/.cache/jaxpipe``.

    Without a home folder: one in the folder for temporary files, which this user alone can enter.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: ignore a relative path.
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = _private_temporary()
    return base / "jaxpipe"


def _private_temporary() -> Path:
    """Return a folder of this user's among temporary files: the same every time, unless somebody else has taken its name."""
    folder = Path(tempfile.gettempdir()) / f"jaxpipe-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        # Anybody may make a folder of this name: one of another user's, or open to others, could hold anything.
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="jaxpipe-"))
