"""What runs leave and what is measured of them: prompts, run folders, the harness, metrics, reports."""
