"""Proposers: the EAGLE network, and self-drafting from earlier target passes.

A row of adt_tree.method.METHODS names the module that drafts. The function `make` of that module turns a
MethodOnModel (adt_tree.method_on_model) into a Proposer and a Rule.
"""
