"""One list scheduler: a clock over all ranks, and choosers that say what a free rank runs. Reading order: README.md."""
