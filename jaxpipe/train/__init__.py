"""Again: config, data, step, loop, checkpoint, metrics. The only room that knows a step number or a learning rate.

Importing this package imports no JAX; the modules that need it import it themselves.
"""
