"""Write ``jaxpipe/PUBLIC.md``: what may be imported, by package, from each ``__all__``.

``python scripts/public_surface.py`` writes the page; ``tests/scripts/test_public_surface.py`` fails where it is not current.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "jaxpipe" / "PUBLIC.md"
_HEAD = """\
# What may be imported

These names are each package's `__all__`. Import them from the package: modules inside of it, and names that are not listed, may
change without notice. This page is written by `python scripts/public_surface.py`.
"""


def packages() -> Iterator[str]:
    """Yield ``jaxpipe``, its packages and their packages, and modules of its own that have an ``__all__``."""
    import jaxpipe

    yield "jaxpipe"
    for info in pkgutil.walk_packages(jaxpipe.__path__, "jaxpipe."):
        names = info.name.split(".")[1:]
        private = names[0] in ("models", "__main__") or any(name.startswith("_") for name in names)
        if not private and (info.ispkg or len(names) == 1):
            yield info.name


def summary(value: object) -> str:
    """Return the first sentence of a class's or function's docstring, or the kind of another value."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"a {type(value).__name__}"
    text = " ".join((value.__doc__ or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)(?: |$)", text)[0].removesuffix("::")
    plain = re.sub(r":\w+:`[~.]*([^`]*)`", r"`\1`", sentence).replace("``", "`").replace("|", "\\|")
    generated = text.startswith(f"{getattr(value, '__name__', '')}(")  # of a dataclass without a docstring
    return "" if generated else plain


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for package in packages():
        module = importlib.import_module(package)
        names = sorted(getattr(module, "__all__", ()), key=lambda name: (name.lower(), name))
        if names := [name for name in names if not name.startswith("__")]:
            first = (module.__doc__ or "").strip().splitlines()[0]
            rows = (f"| `{name}` | {summary(getattr(module, name))} |" for name in names)
            parts.append("\n".join([f"## `{package}`", "", first, "", "| name | what |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
