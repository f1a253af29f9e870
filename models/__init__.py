"""Backbones behind the roles of adt_tree: targets, drafter, codec, text, and the registry that loads them."""
