"""The compiled functions of stages, and what XLA says of them."""
