"""What: layers, the cut into stages, and the compiled F, B, W and BW of each. Knows arrays and jaxprs, no schedule.

Importing this package imports no JAX; the modules that need it import it themselves.
"""
