"""Schedule families, each in its own file, where ``family.py`` finds it. Reading order: README.md.

The function of every family is a name of this package, too: ``families.v_zb(4, 8)``.
"""

from typing import Any

from jaxpipe.schedule import plugins
from jaxpipe.schedule.families.family import (
    FAMILIES,
    TABLE,
    VOCABULARY_FAMILIES,
    Family,
    cheap_first,
    family,
    family_named,
    generate,
    register_family,
)

__all__ = [
    "FAMILIES",
    "VOCABULARY_FAMILIES",
    "Family",
    "cheap_first",
    "family",
    "family_named",
    "generate",
    "register_family",
]

# Functions before modules of the same name, such as one_f_one_b.
globals().update({x.function.__name__: x.function for x in TABLE.values()})


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        plugins.load_search()
        for entry in TABLE.values():
            if entry.function.__name__ == name:
                return entry.function
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
