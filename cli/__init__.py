"""The command line: one file a command, its options and what it does together."""
