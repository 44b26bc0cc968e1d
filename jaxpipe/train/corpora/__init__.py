"""Where data comes from: documents, tokenizers, token stores, mixtures, arrays, and the order of the sequences."""
