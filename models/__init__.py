"""Model families: their networks as the targets and drafters of adt_tree, their codecs and prompts."""
