"""The recipe of the embedded model, stage by stage."""
