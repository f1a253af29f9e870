"""Who drafts: the EAGLE network, the target's own earlier passes, or a published rival."""
