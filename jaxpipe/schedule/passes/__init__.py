"""Passes: a valid schedule in, a valid schedule out.

:mod:`~jaxpipe.schedule.passes.offload` adds offloads to host memory, :mod:`~jaxpipe.schedule.passes.host_lane` moves each W
behind its B, :mod:`~jaxpipe.schedule.passes.braid` splits or fuses B and W as another schedule has them and adds ops of
users, :mod:`~jaxpipe.schedule.passes.braid` braids what stands side by side, or takes braids apart,
:mod:`~jaxpipe.schedule.passes.separate` splits backwards and puts their W's into bubbles. Reading order of the first:
``host_lane.py`` lives and levels of what is held, and where O and L go, ``plans.py`` plans for all ranks, ``offload.py`` what
leaves and the report.
"""

from jaxpipe.schedule.passes.braid import braid, insert, unbraid
from jaxpipe.schedule.passes.host_lane import prompt_weights
from jaxpipe.schedule.passes.offload import Offloaded, StageOffload, offload
from jaxpipe.schedule.passes.separate import separate_gradients

__all__ = ["Offloaded", "StageOffload", "braid", "insert", "offload", "prompt_weights", "separate_gradients", "unbraid"]
