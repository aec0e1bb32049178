"""torch_checkpointing."""
