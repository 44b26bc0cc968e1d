"""Schedule families, each in its own file, where ``registry.py`` finds it. Reading order: README.md.

The function of every family is a name of this package, too: ``families.v_zb(4, 8)``.
"""

from jaxpipe.schedule.families.family import FAMILIES, TABLE, VOCABULARY_FAMILIES, Family, family, register_family
from jaxpipe.schedule.families.registry import family_named, generate

__all__ = ["FAMILIES", "VOCABULARY_FAMILIES", "Family", "family", "family_named", "generate", "register_family"]

globals().update({x.function.__name__: x.function for x in TABLE.values()})
