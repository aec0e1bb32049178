"""The commands of `ucp`, imported one at a time by `ucformat.cli.program`."""
