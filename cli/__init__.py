"""The command line: one file per command, which declares the command's options and runs it."""
