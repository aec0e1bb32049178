"""The checkpoints of a training run as one array along its steps."""
