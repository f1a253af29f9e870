"""The command line: one file per command, which declares the command's options and runs it.

The docstring of a class of options is the heading of these options in --help (cli/parser.py).
"""

import lab as lab  # its rows of METHODS are choices of --method
