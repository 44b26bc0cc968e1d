"""Does it fit, and how fast would it be? Memory and time of a training config on machines that are not here.

Read the README beside this file for the order of the modules.
"""
