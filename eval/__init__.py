"""Commands that run models: image generation, benchmark, sweep; their options, prompts and outputs."""
