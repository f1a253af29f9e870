"""Cost tables kept: measured once a device, model and precision, and the tree sizes chosen by them.

They lie in $XDG_CACHE_HOME/adt-tree/costs (by default ~/.cache), a file for each set of circumstances:
device, threads, weights, precision, guidance, torch and commit. Other circumstances are measured anew. What
a run chose lies in its folder, and its later parts take it from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adt_tree.cost import ROUNDS, SIZES, WIDTHS, CostTable, Offer, best, measure, offers
from adt_tree.policy import TreeShape, self_drafted
from adt_tree.sampling import Sampling
from eval.claims import alone
from eval.errors import UserError
from eval.families import TAUS
from eval.measure import Lane
from eval.method import Method
from eval.outputs import LOCK, make_folder, write_json
from eval.prompts import Prompt
from eval.session import check_graphs, circumstances
from models.model import Model
from models.target import Opening

CHOICE = "tree_size.json"  # in a run's folder: what --total_token auto chose there, and by which costs
CYCLE = ("measured", "target", "drafter", "rest")
PASSING = ("date", "dirty")  # circumstances that change no cost


def cost_path(model: str, facts: Mapping[str, Any]) -> Path:
    """The file of tables measured under these circumstances."""
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(home) if home else Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return root / "adt-tree" / "costs" / f"{model}-{facts['precision']}-{digest}.json"


def read_tables(path: Path, facts: Mapping[str, Any]) -> dict[int, CostTable]:
    """The tables in a file, by images in flight; none if there is no file. UserError if it is damaged or of
    other circumstances."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        stored, tables = found["facts"], [CostTable.from_dict(table) for table in found["tables"]]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"cost table {path} is damaged: delete it, and it is measured anew") from None
    for name, value in json.loads(json.dumps(facts)).items():
        if stored.get(name) != value:
            raise UserError(
                f"cost table {path} was measured with {name} = {stored.get(name)!r}, now it is {value!r}: "
                "delete it, and it is measured anew"
            )
    return {table.images: table for table in tables}


def cost_table(
    args: argparse.Namespace,
    model: Model,
    sampling: Sampling,
    prompt: Opening,
    images: int,
    fresh: bool = False,
) -> CostTable:
    """What cycles with `images` images in flight cost here: as kept, or measured now and kept.

    prompt: any of the run's. fresh: measure in any case. UserError for a file that cannot be read or written.
    """
    facts = {name: value for name, value in circumstances(model, args).items() if name not in PASSING}
    facts |= {"branches": sampling.branches, "greedy": sampling.greedy, "device_map": args.device_map}
    facts["cuda_graphs"] = check_graphs(args)
    path = cost_path(args.model, facts)
    try:
        tables = read_tables(path, facts)
        if fresh or images not in tables:
            tables[images] = _measured(model, sampling, prompt, images)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"facts": facts, "tables": [tables[count].as_dict() for count in sorted(tables)]}
            write_json(path, content)
    except OSError as error:
        raise UserError(
            f"cost table {path}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return tables[images]


def _measured(model: Model, sampling: Sampling, prompt: Opening, images: int) -> CostTable:
    """Measure, under a bar. UserError where the model has no room for the largest passes."""
    try:
        target = model.target(images, sampling, max(SIZES), model.prompt_length(prompt))
    except ValueError as error:
        raise UserError(f"what passes cost cannot be measured: {error}") from error
    drafter = None if model.drafter_net is None else model.drafter(target, 1, max(WIDTHS))
    with tqdm(total=ROUNDS + 2, desc=f"costs, {images} in flight", unit="round", disable=None) as bar:
        return measure(target, drafter, prompt, sampling, bar.update)


def cycle(lane: Lane, table: CostTable) -> dict[str, Any]:
    """Mean milliseconds of an arm's cycles, as its steps have them, beside the passes they were made of by
    the cost table; rest: what was measured less both. Padding to the largest tree of a batch is left out."""
    steps = [step for image in lane.images for step in image.steps]
    proposer = lane.decoder.proposer
    target = drafter = 0.0
    for step in steps:
        target += table.target.at(1 + step.nodes, step.position)
        if proposer is not None:
            calls = proposer.calls(TreeShape(step.depth, step.width, step.nodes))
            drafter += table.drafting(step.depth, step.width, calls, step.position)
    whole = sum(step.ms for step in steps)
    ms = dict(zip(CYCLE, (whole, target, drafter, whole - target - drafter), strict=True))
    return {
        "arm": lane.name,
        "temperature": lane.temperature,
        **{name: round(value / len(steps), 3) for name, value in ms.items()},
    }


def offers_of(args: argparse.Namespace, model: Model, table: CostTable) -> list[Offer]:
    """What self-drafted trees of each size are expected to give, half way through an image."""
    return offers(table, TAUS[args.model], model.grid.size / 2)


def sized(method: Method, nodes: int) -> Method:
    """A self-drafting method with trees of `nodes` nodes; plain decoding of none."""
    return replace(method, shape=self_drafted(nodes) if nodes else None)


def choose_size(
    args: argparse.Namespace, method: Method, model: Model, prompts: Sequence[Prompt], root: Path
) -> Method:
    """The method with the tree size that pays best, by what the run in folder `root` chose or by costs.

    The choice is made once a folder, whoever works in it. UserError if what the folder holds is damaged.
    """
    make_folder(root)
    path = root / CHOICE
    with alone(root / LOCK):
        if not path.exists():
            images = min(args.batch_size, len(prompts))
            sampling = Sampling(method.temperature, method.top_k, method.top_p, method.cfg)
            table = cost_table(args, model, sampling, model.encode(prompts[0].text), images)
            made = offers_of(args, model, table)
            content = {
                "nodes": best(made).nodes,
                "batch_size": images,
                "offers": [{**asdict(offer), "codes_per_s": 1e3 * offer.rate} for offer in made],
                "costs": table.as_dict(),
            }
            write_json(path, content)
    try:
        nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        chosen = sized(method, nodes)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: delete it, or choose another --output_dir") from None
    print(f"--total_token auto: {nodes} drafted nodes a tree{'' if nodes else ', which is plain decoding'}")
    return chosen
