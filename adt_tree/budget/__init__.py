"""The policy of `--total_token auto`, which chooses the size of trees while decoding. No torch here.

A larger tree commits more codes per step and makes every step longer. How much longer depends on the device,
the images in flight and guidance, so it is measured while decoding. The first steps of a run try the
candidate shapes, smallest first, until larger ones cannot be best. From then on the policy takes the shape
that commits most codes per second. A batch of three images or more that begin together is an exception: it
decodes plainly until trials have shown that trees pay (in_step). A trial costs time but no codes: every step
of an exact method commits right codes whatever its tree, so the image does not depend on the choice.
Source of the idea: SmartSpec / TurboSpec (arXiv 2406.14066).
"""
