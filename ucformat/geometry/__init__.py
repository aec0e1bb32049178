"""Boxes, placements, meshes, layouts and read plans: pure, exact, no I/O."""
