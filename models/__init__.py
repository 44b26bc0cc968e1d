"""The models that come with jaxpipe, one file each: ``models.gpt:GPT`` in a checkout, ``jaxpipe.models.gpt:GPT`` anywhere."""
