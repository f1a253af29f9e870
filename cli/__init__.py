"""The command line: one file per command, which declares the command's options and runs it."""

import lab as lab  # its rows of METHODS are choices of --method
