"""Folders of the Hugging Face hub in and out: tables of tensors, safetensors files, ``config.json``, tokenizers."""
