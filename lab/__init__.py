"""What is measured beside the methods of adt_tree: rivals, several rows at once."""
