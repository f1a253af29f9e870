"""A decoding method for transformers: `model.generate(..., custom_generate=...)` decodes with this engine."""
