"""The server of `ucp serve`: checkpoints of the catalog as a hub of models, as arrays, and as pages (extra `web`)."""
