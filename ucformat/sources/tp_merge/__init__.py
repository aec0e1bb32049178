"""Merging tensor-parallel ranks' parts into whole tensors, for every engine that saves each rank's parts separately."""
