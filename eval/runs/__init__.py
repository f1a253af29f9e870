"""What a run reads and writes: prompts, the run folder, stored measurements, processes."""
