"""The sampling of the images in flight, which may differ from slot to slot."""

from __future__ import annotations

import math

import torch

from adt_tree.sampling import RowSampling, Sampling


class SlotSampling:
    """The settings of every slot, on the host and as tensors that begin() updates in place.

    Temperature, guidance and top_p may differ from slot to slot. While all images in flight have the engine's
    sampling, passes get that one Sampling and cost no more than without this class.
    """

    def __init__(self, common: Sampling, slots: int, device: torch.device) -> None:
        """common: the engine's sampling, used for every image whose request names none."""
        self.common = common
        self._slots = [common] * slots
        self._temperature, self._guidance, self._top_p = torch.ones(3, slots, device=device).unbind(0)
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=device)
        for slot in range(slots):
            self._set(slot, common)

    def begin(self, slot: int, sampling: Sampling) -> None:
        """Gives a slot the settings of its next image.

        Raises ValueError if top_k or the order of filters differ from the engine's, or if the image needs
        guidance or noise and the engine has none.
        """
        common = self.common
        if (sampling.top_k, sampling.top_p_first) != (common.top_k, common.top_p_first):
            raise ValueError(f"{sampling}: top_k and top_p_first must be those of the engine, {common}")
        if sampling.branches > common.branches or common.greedy > sampling.greedy:
            raise ValueError(f"{sampling}: an engine for {common} has no guidance, or no noise")
        if sampling != self._slots[slot]:
            self._set(slot, sampling)

    def release(self, slot: int) -> None:
        """Resets an idle slot to the engine's sampling."""
        self.begin(slot, self.common)

    def _set(self, slot: int, sampling: Sampling) -> None:
        self._slots[slot] = sampling
        # No filter applies to a greedy image, and temperature 1 leaves its logits as they are.
        unfiltered = sampling.greedy or sampling.top_p >= 1
        self._temperature[slot] = 1.0 if sampling.greedy else sampling.temperature
        self._top_p[slot] = math.inf if unfiltered else sampling.top_p
        self._guidance[slot], self._greedy[slot] = sampling.guidance, sampling.greedy

    @property
    def for_pass(self) -> Sampling | RowSampling:
        """The settings of the next pass: one Sampling if all images in flight share the engine's."""
        common = self.common
        if all(sampling is common or sampling == common for sampling in self._slots):
            return common
        filtered = any(sampling.top_p < 1 and not sampling.greedy for sampling in self._slots)
        top_p = self._top_p if filtered else 1.0
        settings = (self._temperature, self._greedy, self._guidance)
        return RowSampling(*settings, common.top_k, top_p, common.top_p_first)
