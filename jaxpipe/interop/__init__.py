"""Read and write folders of the Hugging Face hub: tables of tensors, safetensors files, ``config.json``, tokenizers."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    folder="Hub Planned Weights is_hub new_folder open_hub read_json weights_of write_json write_tensors",
    table="HuggingFace Keys Tensor hugging_face_of refused",
)
