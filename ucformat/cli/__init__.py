"""The command line `ucp`: a thin interface to `ucformat`, whose commands are imported when they are called."""
