"""The commands that score images, eval_*: one file per command."""
