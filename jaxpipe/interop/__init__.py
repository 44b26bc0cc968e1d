"""Read and write folders of the Hugging Face hub: tables of tensors, safetensors files, ``config.json``, tokenizers."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    folder="Planned new_folder read_json write_json write_tensors",
    hub="Hub Weights is_hub open_hub weights_of",
    table="HuggingFace Keys Tensor hugging_face_of refused",
)
