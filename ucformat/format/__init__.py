"""The universal checkpoint on disk: Zarr arrays, manifest, commit, verify; writer and reader."""
