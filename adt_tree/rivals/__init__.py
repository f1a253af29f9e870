"""The published training-free rivals: Jacobi windows under rejection sampling, measured by the same harness.

They keep the target's distribution, but share no noise with the AR baseline, so that a seed gives another
image. With Gumbel noise fixed per position as the coupling (2510.24211's second one) a window is what
adt_tree.self_draft drafts by its main chain; it does not stand here again.
"""
