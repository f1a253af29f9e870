"""The front door: a loaded model, prompts in, images out. The one file here that may import models/.

pipe = Pipeline.from_pretrained("emoji")
out = pipe("noto emoji of red heart", method="adt-tree", sampling=Sampling(temperature=1.0), seed=7)
out.images[0].save("heart.png")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from adt_tree.batch import StepOutput
from adt_tree.engine import Engine, build
from adt_tree.errors import UserError
from adt_tree.method import METHODS, Lantern, Method, Tree
from adt_tree.records import Decoded, Step
from adt_tree.roles import Request
from adt_tree.sampling import Sampling
from models.loading import load
from models.model import Model
from models.spec import LoadOptions

OPTIONS = LoadOptions()


@dataclass(frozen=True, slots=True)
class Output:
    """What a call gives, one entry a prompt, in the order of the prompts."""

    images: list[Image.Image]
    decoded: list[Decoded]

    @property
    def codes(self) -> list[list[int]]:
        """Codebook ids of every image in raster order."""
        return [image.codes for image in self.decoded]

    @property
    def steps(self) -> list[list[Step]]:
        """One Step per target call of every image."""
        return [image.steps for image in self.decoded]

    @property
    def stats(self) -> dict[str, float]:
        """Over all images: tau (codes per target call), calls, depth, nodes and seconds per image."""
        count, calls = len(self.decoded), sum(image.target_calls for image in self.decoded)
        committed = sum(step.accepted + 1 for image in self.decoded for step in image.steps)

        def mean(name: str) -> float:
            return sum(getattr(image, name) for image in self.decoded) / count

        names = ("target_calls", "drafter_calls", "mean_depth", "mean_nodes", "seconds")
        return {"tau": committed / max(calls, 1), **{name: mean(name) for name in names}}


@dataclass(frozen=True, slots=True)
class TreeView:
    """A draft tree on the host, parents before children; node 0 is the code committed before."""

    codes: list[int]
    parents: list[int]  # parents[0] = 0
    depths: list[int]
    confidence: list[float]  # the drafter's log-confidence in the path down to each node; 0 at the root
    path: list[int]  # accepted nodes, from the first level on


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One target call as one image saw it."""

    image: int  # place of its prompt
    position: int  # of the first code committed; the first step follows the one code that the prompt gave
    codes: list[int]  # committed: accepted drafts and the target's own next code
    step: Step
    tree: TreeView


class Pipeline:
    """A loaded model and every way to decode with it."""

    def __init__(self, model: Model) -> None:
        """Wrap a model that models/ loaded."""
        self.model = model

    @classmethod
    def from_pretrained(
        cls,
        model: str = "emoji",
        *,
        drafter: str | None = None,
        device: str = "auto",
        precision: str = "auto",
        options: LoadOptions = OPTIONS,
    ) -> Pipeline:
        """Load a model by its name, a folder or a hub id. CheckpointError for what cannot be loaded.

        options: the rest of what can be asked of loading; drafter, device and precision go before its own.
        """
        drafter = drafter or options.drafter_path
        return cls(load(model, replace(options, drafter_path=drafter, device=device, precision=precision)))

    @classmethod
    def from_transformers(cls, model: Any, tokenizer: Any, *, options: LoadOptions = OPTIONS) -> Pipeline:
        """A Janus, Emu3 or Chameleon model that transformers has loaded, with its processor or tokenizer.

        Its weights are shared but for queries and keys, whose rows are ordered differently here, and on a
        CPU the layers, which decoding packs. It stays usable. CheckpointError for any other model.
        """
        from models.layouts.adopted import adopt

        return cls(adopt(model, tokenizer, options))

    def method(
        self,
        name: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: Tree | None = None,
        lantern: Lantern | None = None,
        verify: str = "coupled",
        rules: str = "fixed",
        seed_cells: str | None = None,
        control: str | None = None,
    ) -> Method:
        """A method with the model's own tree where none is given. ValueError for what cannot be combined.

        name None: the fastest exact method of this model; sampling None: that of the model. A whole Method
        stays as it is: sampling, tree and lantern beside it are refused.
        """
        if isinstance(name, Method):
            for word, value in {"sampling": sampling, "tree": tree, "lantern": lantern}.items():
                if value is not None:
                    raise UserError(f"{word} beside a Method: it has one of its own; give one of them")
            return name
        name = name or self.default_method
        tree = self.model.spec.default_tree(name) if tree is None else tree
        return Method(name, sampling or self.sampling, tree, lantern, verify, rules, seed_cells, control)

    @property
    def methods(self) -> list[str]:
        """Names of the methods that this model can decode with: all, or all that need no drafter network."""
        network = self.model.drafter_net is not None
        return [name for name, spec in METHODS.items() if network or not spec.network]

    @property
    def sampling(self) -> Sampling:
        """At temperature 1, with the guidance and the filter that the model was published with."""
        spec = self.model.spec
        return Sampling(guidance=spec.guidance, top_k=spec.top_k or 0)

    @property
    def default_method(self) -> str:
        """The fastest exact method of this model."""
        return self.model.spec.method

    def __call__(
        self,
        prompts: str | Sequence[str],
        method: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: Tree | None = None,
        lantern: Lantern | None = None,
        seed: int | Sequence[int] = 0,
        batch_size: int = 1,
    ) -> Output:
        """Images of the prompts. One seed and prompt give one image under every exact method, alone or in any
        batch; prompt n of a list has seed + n unless a seed is given for each.

        ValueError for a method, tree or prompt that the model cannot do.
        """
        chosen = self.method(method, sampling=sampling, tree=tree, lantern=lantern)
        requests = self.requests(prompts, seed)
        done = {image.name: image for image in self.engine(chosen, requests, batch_size).decode(requests)}
        decoded = [done[request.name] for request in requests]
        return Output([self.image(image.codes) for image in decoded], decoded)

    def stream(
        self,
        prompts: str | Sequence[str],
        method: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: Tree | None = None,
        lantern: Lantern | None = None,
        seed: int | Sequence[int] = 0,
        batch_size: int = 1,
    ) -> Iterator[StreamStep]:
        """Every target call of the images that __call__ would make, as it happens: enough to paint them.

        An image is finished once its codes fill the grid. Closing the iterator ends the decoding.
        """
        chosen = self.method(method, sampling=sampling, tree=tree, lantern=lantern)
        requests = self.requests(prompts, seed)
        for output in self.engine(chosen, requests, batch_size).steps(requests):
            views = _views(output)
            for slot, image in output.images:
                step, view = image.steps[-1], views[slot]
                yield StreamStep(int(image.name), step.position, image.codes[step.position :], step, view)

    def requests(self, prompts: str | Sequence[str], seed: int | Sequence[int]) -> list[Request]:
        """A request a text, named by its place. ValueError if the seeds are not as many."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        if not texts:
            raise UserError("no prompt: give a text or a list of texts")
        seeds = [seed + place for place in range(len(texts))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(texts):
            raise UserError(f"{len(seeds)} seeds for {len(texts)} prompts: give one seed, or one for each")
        encoded = self.model.encode_all(texts)
        return [
            Request(str(place), prompt, own)
            for place, (prompt, own) in enumerate(zip(encoded, seeds, strict=True))
        ]

    def engine(self, method: Method, requests: Sequence[Request], batch_size: int = 1) -> Engine:
        """An engine with room for these requests, batch_size of them in flight."""
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size}: give 1 or more images in flight")
        longest = max(request.prompt.length for request in requests)
        return build(self.model, method, min(batch_size, len(requests)), longest)

    def image(self, codes: list[int]) -> Image.Image:
        """Codes in raster order -> an RGB picture."""
        return self.model.image(codes)


def _views(output: StepOutput) -> list[TreeView]:
    """The trees of all slots on the host, by one transfer; fp64 holds every integer of them."""
    tree, verdict = output.tree, output.verdict
    confidence = torch.zeros_like(tree.codes) if tree.confidence is None else tree.confidence
    parts = (tree.codes, tree.parents, tree.depths, tree.valid, confidence)
    table = torch.stack([part.double() for part in parts], dim=1).tolist()
    views = []
    for rows, path, count in zip(table, verdict.path.tolist(), verdict.count.tolist(), strict=True):
        kept = [node for node, valid in enumerate(rows[3]) if valid]
        place = {node: number for number, node in enumerate(kept)}
        views.append(
            TreeView(
                codes=[int(rows[0][node]) for node in kept],
                parents=[place[int(rows[1][node])] for node in kept],
                depths=[int(rows[2][node]) for node in kept],
                confidence=[rows[4][node] for node in kept],
                path=[place[node] for node in path[1:count]],
            )
        )
    return views
