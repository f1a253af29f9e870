"""Who drafts: the EAGLE network, the target's own earlier passes, or a published rival.

Every module but candidates.py has a function `make` that turns a Setup (adt_tree.roles) into a Proposer. Rows
of adt_tree.method.METHODS name the modules.
"""
