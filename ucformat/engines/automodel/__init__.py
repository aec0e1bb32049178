"""Checkpoints of NeMo AutoModel: a folder of weights beside a DCP checkpoint of the optimizer."""
