"""The parts of gpu_check: tokens against the CPU's, speed against the bandwidth, transformers beside it."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.tree import root_only_tree
from eval import arms
from eval.controls import roofline
from eval.method import Method
from eval.profiling import profile
from eval.session import synchronise
from models.graphs import graphs_of
from models.loading import load, pick_precision
from models.model import DTYPES, Model
from models.registry import EMOJI, spec_of
from models.spec import LoadOptions
from models.tools.memory import Use, published_use
from models.tools.random_model import random_model

SHAPED = ("anole", "lumina_mgpt", "llamagen2")
LAW = (1.0, 2000, 1.0, 3.0)  # temperature, top_k, top_p, guidance
TREES = {  # name -> how the tree is drafted; the number is of its nodes, the root included
    "ar": {},
    "static 26": {"static": "mc_sim_7b_63"},
    "dynamic 59": {"shape": TreeShape(5, 10, 58)},
    "jacobi 64": {"shape": TreeShape(24, 8, 63), "drafter": "jacobi"},
    "hybrid 64": {"shape": TreeShape(24, 8, 63), "drafter": "hybrid"},
}
MOST_IMAGES = 5  # to warm up with
LEVEL = 10  # nodes of a drafter's level
REPEATS = 20  # of a pass that is timed by itself
PROMPT = "a smiling face"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and on what the parts run."""

    device: torch.device
    shapes: str  # published or tiny
    codes: int  # of an image that is timed
    folder: Path  # of the embedded model

    @staticmethod
    def of(device: str, shapes: str, codes: int, folder: str | None) -> Setting:
        """From the options."""
        return Setting(torch.device(device), shapes, codes, Path(folder) if folder else EMOJI)

    @property
    def graphs(self) -> tuple[bool, ...]:
        """Without and, where there is CUDA, with graphs."""
        return (False, True) if self.device.type == "cuda" else (False,)

    def precision(self, model: str) -> str:
        """Of a model's weights and activations, what a user gets who asks for none."""
        return pick_precision("auto", self.device.type, spec_of(model))


def tokens(setting: Setting) -> dict[str, Any]:
    """Every exact method on the device, in fp32, against plain decoding on the CPU: codes that differ."""
    where = {"cpu": _emoji(setting, "cpu"), "device": _emoji(setting, setting.device.type)}
    rows, most = [], where["cpu"].num_codes
    for temperature in (0.0, 1.0):
        law = (temperature, min(LAW[1], most), *LAW[2:])
        expected = _codes(where["cpu"], Method(*law))
        for name, tree in TREES.items():
            for graphs in setting.graphs:
                found = _codes(replace(where["device"], graphs=graphs), Method(*law, **tree))
                different = sum(a != b for a, b in zip(found, expected, strict=True))
                rows.append({"arm": name, "T": temperature, "graphs": graphs, "different": different})
    wrong = [row for row in rows if row["different"]]
    failed = {"failed": f"{len(wrong)} of {len(rows)} runs drew other codes than the CPU"} if wrong else {}
    return {"compared": f"{setting.device.type} with cpu", "codes": len(expected), "runs": rows, **failed}


def _emoji(setting: Setting, device: str) -> Model:
    return load("emoji", LoadOptions(str(setting.folder), precision="fp32", device=device))


def _codes(model: Model, method: Method) -> list[int]:
    """One image."""
    opening = model.encode(PROMPT)
    arm = arms.build(model, method, 1, opening.length)
    return next(arm.decode([Request("0", opening, 11)])).codes


def embedded(setting: Setting) -> dict[str, Any]:
    """Speed of the embedded model."""
    precision = setting.precision("emoji")
    device = setting.device.type
    model = load("emoji", LoadOptions(str(setting.folder), precision=precision, device=device))
    return {"precision": precision, **speed(model, model.encode(PROMPT), setting)}


def random(name: str, setting: Setting) -> dict[str, Any]:
    """Speed of a model's dimensions with random weights, in the middle of an image: half of it is prompt."""
    use = use_of(name, setting.shapes)
    side = use.side // use.vq.patch_size
    grid = Grid(min(side, max(2, setting.codes // side)), side)
    precision = setting.precision(name)
    model = random_model(name, use, grid, DTYPES[precision], setting.device)
    before = use.prompt + (side * side - grid.size) // 2
    return {
        "precision": precision,
        "layers": use.decoder.num_layers,
        "width": use.decoder.hidden_size,
        "codes_before": before - use.prompt,
        **speed(model, model.encode(str(before)), setting),
    }


def use_of(name: str, shapes: str) -> Use:
    """The published dimensions of a model, or tiny ones of its kind."""
    use = published_use(name)
    if shapes == "published":
        return use
    rows = (use.tokens - (use.side // use.vq.patch_size) ** 2) > 0
    heads = {"num_heads": 4, "num_kv_heads": 4}
    small = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300, **heads}
    raster = {"raster_side": 8} if use.decoder.raster_side else {}
    vq = replace(use.vq, num_embeddings=256, embed_dim=8)
    return replace(
        use,
        decoder=replace(use.decoder, num_layers=2, **small, **raster),
        drafter=replace(use.drafter, num_layers=1, **small, **raster),
        vq=vq,
        side=8 * vq.patch_size,
        tokens=72 if rows else 64,
        prompt=8,
    )


def speed(model: Model, opening: Any, setting: Setting) -> dict[str, Any]:
    """Milliseconds a cycle of every arm, and of its parts; what the memory's bandwidth would allow."""
    cuda = setting.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    bound = roofline(model)
    rows = [
        _cycles(replace(model, graphs=graphs), name, opening, setting)
        for graphs in setting.graphs
        for name in TREES
    ]
    passes = [_passes(replace(model, graphs=graphs), opening, setting) for graphs in setting.graphs]
    plain = next(row["cycle_ms"] for row in reversed(rows) if row["arm"] == "ar")
    best = min(row["pass_ms"]["1"] for row in passes)
    for row in rows:
        row["over_ar"] = round(row["cycle_ms"] / plain, 3)
    return {
        **bound,
        "ar_over_read": round(plain / bound["read_ms"], 3),
        "achieved_gb_per_s": round(bound["weights_mb"] / best, 2),
        "cycles": rows,
        "passes": passes,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if cuda else "not measured: no CUDA",
    }


def _cycles(model: Model, name: str, opening: Any, setting: Setting) -> dict[str, Any]:
    """One arm: images to warm up, one by the clock, one in parts, one whose waits are counted."""
    law = (LAW[0], min(LAW[1], model.num_codes), *LAW[2:])
    arm = arms.build(model, Method(*law, **TREES[name]), 1, opening.length)
    request = Request(name, opening, 3)
    warm_up(arm, request)
    image = next(arm.decode([request]))
    return {
        "arm": name,
        "graphs": model.graphs,
        "cycle_ms": round(float(np.median([step.ms for step in image.steps])), 3),
        "cycles": len(image.steps),
        "nodes": 1 + max(step.nodes for step in image.steps),
        "share": profile(arm, [request]),
        "waits_a_cycle": waits(arm, request, setting.device),
    }


def warm_up(arm: arms.Arm, request: Request) -> None:
    """Draw an image until it captures nothing more, MOST_IMAGES at most."""
    seen = -1
    for _ in range(MOST_IMAGES):
        list(arm.decode([request]))
        graphs = graphs_of(arm.target)
        before, seen = seen, graphs.captured if graphs else -1
        if seen == before:
            return


def waits(arm: arms.Arm, request: Request, device: torch.device) -> float | str:
    """Operations a cycle by which the host waits for the device, from the second target pass on."""
    if device.type != "cuda":
        return "not measured: no CUDA"
    forward, passes = arm.target.forward, 0

    def watched(tree: Any, committed: Any) -> Any:
        nonlocal passes
        if passes == 1:
            torch.cuda.set_sync_debug_mode("warn")
        passes += 1
        return forward(tree, committed)

    arm.target.forward = watched
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            list(arm.decode([request]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
            del arm.target.forward
    return round(sum("called a synchronizing" in str(w.message) for w in seen) / (passes - 1), 3)


@torch.inference_mode()
def _passes(model: Model, opening: Any, setting: Setting) -> dict[str, Any]:
    """Milliseconds of a target pass by rows and of a drafter's level, behind the prompt, without row ends."""
    sampling, device = arms.Sampling(*LAW), setting.device
    target = model.target(1, sampling, 64, opening.length)
    target = getattr(target, "tokens", target)
    drafter = model.drafter(target, 5, LEVEL)
    code = torch.zeros(1, dtype=torch.int64, device=device)
    prefix = target.prefill(0, opening)
    drafter.prefill(0, opening, prefix)
    one = root_only_tree(code)
    last = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    _, feature = drafter.extend(last, code[:, None], torch.ones_like(code), [0])
    nodes = code[:, None].expand(-1, LEVEL)
    features = feature[:, :, None].expand(-1, -1, LEVEL, -1)
    eye = torch.eye(LEVEL, dtype=torch.bool, device=device)[None]

    def chain(count: int) -> Any:
        order = torch.arange(count, device=device)[None]
        seen = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
        return replace(
            one, codes=torch.zeros_like(order), parents=(order - 1).clamp(min=0), depths=order,
            ancestors=seen, valid=torch.ones_like(order, dtype=torch.bool), depth=count - 1, width=1,
        )  # fmt: skip

    trees = {count: chain(count) for count in (1, 26, 59, 64)}
    timed = {
        str(count): _timed(lambda tree=tree: target.forward(tree, [0]), device)
        for count, tree in trees.items()
    }
    level = _timed(lambda: drafter.expand(nodes, features, eye, 0), device)
    return {"graphs": model.graphs, "pass_ms": timed, "drafter_level_ms": level, "level_nodes": LEVEL}


def _timed(run: Any, device: torch.device) -> float:
    """Median milliseconds of run()."""
    found = []
    for _ in range(REPEATS + 3):
        synchronise(device)
        started = time.perf_counter()
        run()
        synchronise(device)
        found.append(1e3 * (time.perf_counter() - started))
    return round(float(np.median(found[3:])), 3)


def transformers(setting: Setting) -> dict[str, Any]:
    """transformers' generate() with a static cache: on the embedded model, and on Anole's dimensions."""
    from eval.baseline import load_net, random_net, step_ms

    use = use_of("anole", setting.shapes)
    side = use.side // use.vq.patch_size
    nets = {
        "emoji": lambda: load_net(setting.folder, setting.precision("emoji"), setting.device),
        "anole": lambda: random_net(use.decoder, DTYPES[setting.precision("anole")], setting.device),
    }
    before = {"emoji": 8, "anole": use.prompt + side * side // 2}
    return {
        name: [
            {"compiled": compiled, "step_ms": step_ms(make(), before[name], compiled)}
            for compiled in setting.graphs
        ]
        for name, make in nets.items()
    }
