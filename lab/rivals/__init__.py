"""The published training-free rivals, with which bench compares self-draft: one file each.

Three of them draft and judge by lab.rivals.jacobi_window; they differ in the tail. sjd-gumbel needs the
coupled rule alone.
"""
