"""Merging the parts of tensor-parallel ranks into whole tensors, for every engine that saves them apart."""
