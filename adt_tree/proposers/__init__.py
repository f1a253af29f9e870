"""Proposers: the EAGLE network, self-drafting from earlier target passes, and the published rivals.

A row of adt_tree.method.METHODS names the module that drafts (eagle, self_draft, gumbel_window or rivals).
The function `make` of that module turns a Setup (adt_tree.roles) into a Proposer.
"""
