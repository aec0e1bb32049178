"""Checkpoints of veRL: what each rank of FSDP has, in files of its own."""
