"""Lightning and Fabric."""
