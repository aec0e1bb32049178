"""`load` and `state_dict`: from a checkpoint into the tensors and values of a program."""
