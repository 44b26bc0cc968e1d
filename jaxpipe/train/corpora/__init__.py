"""Data sources: documents, tokenizers, token stores, mixtures, arrays, and the order of the sequences."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    arrays="ArrayDataset",
    corpus="Corpus load_corpus",
    encoding="Reading",
    mixture="MixedDataset",
    ngram="baselines bits_per_byte",
    own_data="UserDataset",
    store="Store",
    store_build="build_store",
    tokenizers="Tokenizer load_tokenizer",
)
