"""Proposers: the EAGLE network, self-drafting from earlier target passes, and the published rivals.

Every module but candidates.py has a function `make` that turns a Setup (adt_tree.roles) into a Proposer. A
row of adt_tree.method.METHODS names its module.
"""
