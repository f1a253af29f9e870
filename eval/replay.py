"""replay: other proposers and policies, or rules, on a run's dump.

Arms need no pass of the target: what the coupled rule commits does not depend on drafts, so a recorded image
is the image of every arm. The real loop, proposers, policies and rule run against a target that plays it
(eval/dumped.py): exact for eagle, for self-drafting in the recorded arm at most.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adt_tree.policy import TreeShape
from adt_tree.records import Decoded
from eval import arms, rules
from eval.dumped import AS_RECORDED, DumpedImage, RecordedModel, read_dumps, requests
from eval.errors import UserError
from eval.method import Method, method_from
from eval.oracle import Costs, oracle
from eval.outputs import STEPS, read_steps, write_json
from eval.replay_options import FIXED, ORACLE, bounded, check_used, methods, with_defaults
from eval.session import circumstances, load_model
from models.model import Model

CONFIGURATION = "generation_configs.json"
LATER = {
    **dict.fromkeys(
        (
            "drafter_alignment",
            "device_map",
            "revision",
            "lantern_table",
            "vq_path",
            "text_encoder",
            "class_labels",
        )
    ),
    "keep_text_encoder": False,
}  # options that older runs did not have, as they would have had them
WANTED = "give the folder of generate_images --dump N"


def run(args: argparse.Namespace) -> None:
    """Replay or compare rules, print the table, store it; the last line printed is one JSON document."""
    options, weights, drafter = read_options(args)
    recorded = method_from(argparse.Namespace(**{**vars(options), "drafter_path": None}))
    check_used(args, recorded)
    args = with_defaults(args)
    chosen = [] if args.rules else exact_methods(args, recorded)
    model = load_model(options, args.rules or any(method.needs_drafter for method in chosen))
    check_weights(args, model, weights)
    dumps = read_dumps(Path(args.run), model.codebook.device)[: args.num_images]
    slots = min(options.batch_size, len(dumps))
    if args.rules:
        rules.check(Path(args.run), recorded, dumps)
        rows = rules.compare(model, recorded, dumps, slots)
        print(rules.table(rows))
    else:
        same_drafter = drafter in (None, model.drafter_sha)
        rows = arm_rows(args, model, recorded, chosen, dumps, slots, same_drafter)
        print(table(rows))
        print(_legend(rows, len(dumps), _costs(args)))
    result = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        **circumstances(model, options),
        "images": len(dumps),
        "recorded": _arm(recorded),
        "options": vars(args),
        "results": rows,
    }
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "replay.json", result)
    print(json.dumps(result))


def exact_methods(args: argparse.Namespace, recorded: Method) -> list[Method]:
    """The method of every row. UserError if the run's images depend on its drafts."""
    if not recorded.exact:
        raise UserError(
            f"{args.run}: not a run of an exact rule, so other drafts would give other images; dump one with "
            "--verify coupled and without --lantern, or add --rules"
        )
    return list(methods(args, recorded))


def arm_rows(
    args: argparse.Namespace,
    model: Model,
    recorded: Method,
    chosen: Sequence[Method],
    dumps: Sequence[DumpedImage],
    slots: int,
    same_drafter: bool,
) -> list[dict[str, Any]]:
    """Every arm's row, and the oracle's. same_drafter: the run had this network, or none.

    A row is marked exact where the run vouches for it: of eagle, which reads the image's path alone, if the
    drafter is the same; self-drafted or hybrid, if the arm is the recorded one and its cycles are those in
    the run's steps.jsonl. They need not be: the laws off the path are those of the recorded drafts, and what
    the hybrid learns is shared by the images of a batch, and begins anew when a run is resumed.
    """
    costs = _costs(args)
    rows = []
    bar = tqdm(chosen, unit="row", disable=None)
    for method in bar:
        bar.set_postfix_str(f"{method.drafter} {policy_of(method)}")
        started = time.perf_counter()
        images = list(played(model, method, dumps, slots))
        told = same_drafter or not method.needs_drafter
        if method.drafter != "eagle":
            told = told and method == recorded and as_run(args.run, images)
        facts = {**_arm(method), "exact": told}
        rows.append(row(facts, images, costs, time.perf_counter() - started))
    for drafter in bounded(args, recorded):
        method = replace(recorded, drafter=drafter, seed_cells=args.seed_cells or recorded.seed_cells)
        exact = same_drafter and drafter == "eagle"
        rows.append(_oracle_row(args, model, method, dumps, costs, slots) | {"exact": exact})
    return rows


def as_run(run: str, images: Sequence[Decoded]) -> bool:
    """Whether the cycles of these images are those that the run stored, but for their clocks."""
    stored = read_steps(Path(run) / STEPS, (image.name for image in images))
    return all(
        [{**asdict(step), "name": image.name, "ms": None} for step in image.steps]
        == [{**step, "ms": None} for step in stored[image.name]]
        for image in images
    )


def _costs(args: argparse.Namespace) -> Costs:
    return Costs(args.level_cost, args.node_cost)


def read_options(args: argparse.Namespace) -> tuple[argparse.Namespace, str, str | None]:
    """The run's own command line, with what replay overrides, and the digests of the weights of its target
    and, if it had one, its drafter. UserError if RUN is no run of generate_images."""
    path = Path(args.run) / CONFIGURATION
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        determines = stored.pop("determines_images")
        weights, drafter = determines["weights"], determines["drafter_weights"]
        stored["drafter_type"] = determines["drafter"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {WANTED}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not of generate_images; {WANTED}") from None
    given = ("model_path", "drafter_path", "batch_size")
    stored |= {name: getattr(args, name) for name in given if getattr(args, name) is not None}
    return argparse.Namespace(**{**LATER, **stored, "device": args.device}), weights, drafter


def check_weights(args: argparse.Namespace, model: Model, weights: str) -> None:
    """UserError if the run is of another target: its features would mislead the drafter."""
    if model.weights_sha != weights:
        raise UserError(
            f"{args.run}: dumped with the weights {weights}, the checkpoint has {model.weights_sha}; give "
            "--model_path, or dump again"
        )


def played(model: Model, method: Method, dumps: Sequence[DumpedImage], slots: int) -> Iterator[Decoded]:
    """The recorded images as the method would have made them. UserError if one departs from its codes."""
    _check_width(method, dumps)
    longest = max(dump.length for dump in dumps)
    arm = replace(arms.build(RecordedModel(model), method, slots, longest), sampling=AS_RECORDED)
    own = {dump.name: dump.codes.tolist() for dump in dumps}
    for image in arm.decode(requests(dumps)):
        if image.codes != own[image.name]:
            raise UserError(
                f"image {image.name}: its replay departs from the recorded codes; its dump is of another "
                "commit, delete it and run generate_images with --dump again"
            )
        yield image


def _check_width(method: Method, dumps: Sequence[DumpedImage]) -> None:
    """Self-drafting reads no more candidates than were kept."""
    kept = min(dump.ahead_codes.shape[1] for dump in dumps)
    width = method.shape.width if method.adapt is None else method.adapt.width_max
    if method.drafter != "eagle" and width > kept:
        raise UserError(
            f"trees {width} nodes wide: a dump keeps {kept} candidates a cell; give at most {kept}"
        )


def policy_of(method: Method) -> str:
    """Who shapes its trees, as --policies names it."""
    return FIXED if method.adapt is None else method.adapt.policy


def _arm(method: Method) -> dict[str, Any]:
    """What names a row."""
    shape, adapt, policy = method.shape, method.adapt, policy_of(method)
    if adapt is not None:
        words = f"d{adapt.depth_min}-{adapt.depth_max} k{adapt.width_min}-{adapt.width_max}"
        return {"proposer": method.drafter, "policy": policy, "shape": words, "budget": adapt.budget}
    words = method.static if shape is None else f"d{shape.depth} k{shape.width}"
    budget = None if shape is None else shape.budget
    return {"proposer": method.drafter, "policy": policy, "shape": words, "budget": budget}


def _oracle_row(
    args: argparse.Namespace,
    model: Model,
    method: Method,
    dumps: Sequence[DumpedImage],
    costs: Costs,
    slots: int,
) -> dict[str, Any]:
    """The row of the best shape at every cell. UserError if the dump keeps too few candidates for one."""
    widest = TreeShape(1, max(args.oracle_widths), 1)
    _check_width(replace(method, shape=widest, adapt=None), dumps)
    shapes = [TreeShape(*x) for x in product(args.oracle_depths, args.oracle_widths, args.budgets)]
    shapes = [shape for shape in dict.fromkeys(shapes) if shape.width <= model.num_codes]
    started = time.perf_counter()
    images = list(oracle(RecordedModel(model), dumps, method, shapes, costs, slots))
    facts = {"proposer": method.drafter, "policy": ORACLE, "shape": f"{len(shapes)} shapes", "budget": None}
    return row(facts, images, costs, time.perf_counter() - started)


def row(facts: dict[str, Any], images: Sequence[Decoded], costs: Costs, seconds: float) -> dict[str, Any]:
    """Means over all cycles, and counts an image. SR: passes of plain decoding / cost, as `costs` has it."""
    steps = [step for image in images for step in image.steps]
    calls, drafted = len(steps), sum(step.nodes for step in steps)
    codes, passes = sum(step.accepted + 1 for step in steps), sum(image.drafter_calls for image in images)
    return {
        **facts, "tau": round(codes / calls, 4), "mean_depth": round(sum(s.depth for s in steps) / calls, 3),
        "mean_nodes": round(drafted / calls, 3), "tau_per_node": round(codes / max(drafted, 1), 4),
        "target_calls": round(calls / len(images), 2), "drafter_calls": round(passes / len(images), 2),
        "SR": round(codes / costs.of(calls, passes, drafted), 3), "replay_s": round(seconds, 3),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows for a reader; a star marks approximations."""
    head = (
        f"{'proposer':<9} {'policy':<8} {'shape':<12} {'budget':>6} {'tau':>7} {'depth':>6} {'nodes':>6} "
        f"{'tau/node':>8} {'target':>7} {'drafter':>8} {'SR':>5} {'seconds':>8}"
    )
    lines = [head, "-" * len(head)]
    for r in rows:
        tau = f"{r['tau']:.2f}{' ' if r['exact'] else '*'}"
        lines.append(
            f"{r['proposer']:<9} {r['policy']:<8} {r['shape']:<12} {r['budget'] or '-':>6} {tau:>7} "
            f"{r['mean_depth']:>6.2f} {r['mean_nodes']:>6.1f} {r['tau_per_node']:>8.3f} "
            f"{r['target_calls']:>7.1f} {r['drafter_calls']:>8.1f} {r['SR']:>5.2f} {r['replay_s']:>8.2f}"
        )
    return "\n".join(lines)


def _legend(rows: Sequence[dict[str, Any]], images: int, costs: Costs) -> str:
    lines = [
        f"\n{images} images. target, drafter: passes an image. SR: passes of plain decoding / (target passes"
        f" + {costs.level:g} drafter passes + {costs.node:g} nodes); a model of cost, not a measurement."
    ]
    if not all(r["exact"] for r in rows):
        lines.append(
            "*: the run does not vouch for it. eagle: the run had another drafter. jacobi, hybrid: off the "
            "image's path the laws are those that the recorded arm's drafts led to; the nearer an arm is to "
            "the recorded one, the nearer its tau."
        )
    return "\n".join(lines)
