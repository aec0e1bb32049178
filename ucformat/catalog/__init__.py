"""The SQL catalog: which checkpoints exist, where they came from, what is said of them, which may be deleted."""
