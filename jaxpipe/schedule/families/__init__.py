"""Schedule families: one file each, listed in :mod:`~jaxpipe.schedule.families.registry`. Reading order: ../README.md."""

from jaxpipe.schedule.families.ada_offload import ada_offload
from jaxpipe.schedule.families.chimera import chimera
from jaxpipe.schedule.families.dualpipe_v import dualpipe_v
from jaxpipe.schedule.families.family import Family
from jaxpipe.schedule.families.gis import gis, gis_g, gis_h
from jaxpipe.schedule.families.gpipe import gpipe
from jaxpipe.schedule.families.hanayo import hanayo
from jaxpipe.schedule.families.interleaved import interleaved_one_f_one_b
from jaxpipe.schedule.families.interleaved_low_memory import interleaved_low_memory
from jaxpipe.schedule.families.looped import looped_bfs, looped_dfs
from jaxpipe.schedule.families.one_f_one_b import eager_one_f_one_b, one_f_one_b
from jaxpipe.schedule.families.pipeoffload import pipeoffload
from jaxpipe.schedule.families.pipeoffload_offloaded import pipeoffload_full, pipeoffload_half
from jaxpipe.schedule.families.registry import FAMILIES, family_named, generate, register_family
from jaxpipe.schedule.families.v_adaptive import v_adaptive
from jaxpipe.schedule.families.v_blocks import one_f_one_b_v, v_half, v_min
from jaxpipe.schedule.families.v_zb import v_zb
from jaxpipe.schedule.families.zb_h import zb_h1, zb_h2
from jaxpipe.schedule.families.zb_heuristic import zb_1p, zb_2p, zero_bubble
from jaxpipe.schedule.families.zb_two_thirds import zb_two_thirds

__all__ = [
    "FAMILIES",
    "Family",
    "ada_offload",
    "chimera",
    "dualpipe_v",
    "eager_one_f_one_b",
    "family_named",
    "generate",
    "gis",
    "gis_g",
    "gis_h",
    "gpipe",
    "hanayo",
    "interleaved_low_memory",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "looped_dfs",
    "one_f_one_b",
    "one_f_one_b_v",
    "pipeoffload",
    "pipeoffload_full",
    "pipeoffload_half",
    "register_family",
    "v_adaptive",
    "v_half",
    "v_min",
    "v_zb",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_two_thirds",
    "zero_bubble",
]
