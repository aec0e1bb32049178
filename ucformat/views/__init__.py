"""A checkpoint under other names, shapes and dtypes: steps, what they compute, and presets between families."""
