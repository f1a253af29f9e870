"""One module per published checkpoint layout: it reads the configuration, prompts and tensors."""
