"""`publish` and `subscribe`: versions of a model, from the ranks that train it to those that serve it."""
