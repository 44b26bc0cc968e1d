"""Folders of the Hugging Face hub in and out: tables of tensors, safetensors files, ``config.json``, tokenizers."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    config="Keys refused",
    folder="Planned new_folder read_json write_json write_tensors",
    hub="Hub Weights is_hub open_hub weights_of",
    table="HuggingFace Tensor hugging_face_of",
)
