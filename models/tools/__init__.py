"""Tools on a model that does not draw: what is wrong with its files, what memory it needs, random weights."""
