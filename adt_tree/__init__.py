"""The method: draft trees for visual autoregressive models. Torch and the standard library only."""
