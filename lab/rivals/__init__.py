"""The published training-free rivals, with which bench compares self-draft.

All but sjd-gumbel, which needs the coupled rule alone, draft and judge by lab.rivals.jacobi_window.
"""
