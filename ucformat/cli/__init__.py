"""The command line `ucp`: a thin face of `ucformat`, one file a command, loaded when it is called."""
