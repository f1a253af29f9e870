"""The published training-free rivals, with which bench compares self-draft.

All but two draft and judge by lab.rivals.jacobi_window: sjd-gumbel needs the coupled rule alone, and cool-sd
judges the trees of eagle-1.
"""
