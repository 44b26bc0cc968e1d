"""Passes: a valid schedule in, a valid schedule out.

:mod:`~jaxpipe.schedule.passes.offload` adds offloads to host memory, :mod:`~jaxpipe.schedule.passes.host_lane` places them on
the lane to the host and can move each W behind its B, :mod:`~jaxpipe.schedule.passes.braid` splits or fuses B and W as another
schedule has them, adds ops of users, and braids neighbouring actions or takes braids apart,
:mod:`~jaxpipe.schedule.passes.reductions` adds the reductions and gathers of data parallelism,
:mod:`~jaxpipe.schedule.passes.separate` splits backwards and puts their W's into bubbles.
README.md says in which order to read.
"""

from jaxpipe.schedule.passes.braid import braid, insert, unbraid
from jaxpipe.schedule.passes.host_lane import prompt_weights
from jaxpipe.schedule.passes.offload import Offloaded, StageOffload, offload
from jaxpipe.schedule.passes.reductions import with_missing_reductions, with_priced_reductions, with_reductions
from jaxpipe.schedule.passes.separate import separate_gradients

__all__ = ["Offloaded", "StageOffload", "braid", "insert", "offload", "prompt_weights", "separate_gradients", "unbraid"]
__all__ += ["with_missing_reductions", "with_priced_reductions", "with_reductions"]
