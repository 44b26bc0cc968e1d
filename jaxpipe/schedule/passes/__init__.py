"""Passes: a valid schedule in, a valid schedule out.

:mod:`~jaxpipe.schedule.passes.offload` adds offloads to host memory, :mod:`~jaxpipe.schedule.passes.prompt_offloads` moves each
O behind its F, :mod:`~jaxpipe.schedule.passes.prompt_weights` each W behind its B, :mod:`~jaxpipe.schedule.passes.backwards`
splits or fuses B and W as another schedule has them, :mod:`~jaxpipe.schedule.passes.braid` braids what stands side by side,
or takes braids apart. Reading order of the first: ``residency.py`` lives and levels of what is held, ``host_lane.py`` where O
and L go, ``plans.py`` plans for all ranks, ``offload.py`` what leaves and the report.
"""

from jaxpipe.schedule.passes.braid import braid, unbraid
from jaxpipe.schedule.passes.offload import Offloaded, StageOffload, offload
from jaxpipe.schedule.passes.prompt_weights import prompt_weights

__all__ = ["Offloaded", "StageOffload", "braid", "offload", "prompt_weights", "unbraid"]
