"""Who drafts: the EAGLE network, the target's own earlier passes, both, or a published rival."""
