"""Records what a loader does with tensors that have no values: a layout of which each rank reads its bytes."""
