"""The training state of a program as one rank holds it: tensors, their pieces and memory, and plain values."""
