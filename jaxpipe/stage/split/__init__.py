"""One stage as one flat jaxpr, and its division into F, B and W by dataflow."""
