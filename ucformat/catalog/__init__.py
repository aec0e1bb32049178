"""The SQL catalog of checkpoints: the room is kept, its models come with the catalog itself."""
