"""jaxpipe: pipeline-parallel training for JAX.

Importing this package imports no JAX; the rooms are imported by name (``jaxpipe.schedule``, ``jaxpipe.stage``, …).
"""

__version__ = "0.1.0"
