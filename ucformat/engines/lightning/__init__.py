"""Lightning and Fabric."""

#: The file with everything but models and optimizers, and its key with Lightning's version.
META, VERSION = "meta.pt", "pytorch-lightning_version"
