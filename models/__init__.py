"""Example models, one file each. Not part of the installed package: named as ``models.gpt:GPT`` and imported at run time."""
