"""Data sources: documents, tokenizers, token stores, mixtures, arrays, and the order of the sequences."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    corpus="Corpus load_corpus",
    datasets="ArrayDataset MixedDataset UserDataset",
    encoding="Reading",
    ngram="baselines bits_per_byte",
    store="Store build_store",
    tokenizers="Tokenizer load_tokenizer",
)
