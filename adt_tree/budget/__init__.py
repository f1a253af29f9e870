"""The policy of `--total_token auto`, which chooses the size of trees while decoding. No torch here.

A larger tree commits more codes per step and makes every step longer. How much longer depends on the device,
the images in flight and guidance, so it is measured while decoding. The first steps of a run try the
candidate shapes, smallest first, until larger ones cannot be best. From then on the policy takes the shape
that commits most codes per second; a self-drafted tree of a depth that was little used is hoped to be better
than it looks. A wrong choice costs time but no codes: every step of an exact method commits right codes
whatever its tree, so the image does not depend on the choice. Source of the idea: SmartSpec / TurboSpec
(arXiv 2406.14066).
"""
