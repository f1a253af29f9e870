"""The published layouts, one for each kind of checkpoint: configuration, prompts, names of tensors."""
