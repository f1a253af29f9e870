"""Files of a checkpoint: fetched, read by headers, checked against what a module asks for, loaded."""
