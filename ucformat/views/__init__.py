"""Views of a checkpoint under other names, shapes and dtypes: steps, computed tensors, and presets."""
