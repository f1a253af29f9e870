"""Puts a method that decodes several rows at once on a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from adt_tree.batch import BatchSlots
from adt_tree.engine import Engine, one_loop
from adt_tree.grid import Grid
from adt_tree.method import Method
from adt_tree.method_on_model import MethodOnModel
from adt_tree.noise_table import NoiseTable
from adt_tree.policy import ROOT_ONLY
from adt_tree.roles import Model, Run
from lab.rows.decode import RowImages, several_rows
from lab.rows.schedule import Schedule
from lab.settings import Rows


def build(model: Model, method: Method, slots: int, max_prompt: int) -> Engine:
    """See adt_tree.engine.build."""
    rows = method.relaxed_rule
    assert isinstance(rows, Rows)
    schedule = Schedule.of(rows, model.grid)
    if schedule.raster_order:
        return one_loop(model, method, slots, max_prompt)
    return rows_engine(model, method, slots, max_prompt, schedule)


def rows_engine(model: Model, method: Method, slots: int, max_prompt: int, schedule: Schedule) -> Engine:
    """Returns the engine that decodes in the order of a schedule."""
    shape = method.tree.largest if method.tree is not None and method.drafting else ROOT_ONLY
    max_nodes = schedule.heads * shape.num_nodes
    target: Any = model.target(slots, method.ordered_sampling, max_nodes, max_prompt)  # a RowTarget
    batch = HeadBatch(target.grid, target.num_codes, slots * schedule.heads, target.device, target.run)
    setup = MethodOnModel(model, method, target, batch, shape)
    proposer, rule = None, setup.rule()
    if method.drafting:
        assert method.spec.module is not None
        proposer, rule = import_module(method.spec.module).make(setup)
    # The rows in progress may be any rows of the image, so the table holds the noise of all its codes.
    noise = NoiseTable(rule.noise, target, target.grid.size)
    in_flight = BatchSlots(target, noise, [target.release], method.ordered_sampling)
    loop = partial(several_rows, target, RowImages(target, schedule, shape, proposer), rule, in_flight)
    return Engine(method, target, loop, max_nodes)


@dataclass(slots=True)
class HeadBatch:
    """The heads of all images, as a proposer sees them: a slot for each."""

    grid: Grid
    num_codes: int
    slots: int
    device: torch.device
    run: Run
