"""The input and output of a run: prompts, the run folder, stored measurements, the environment."""
