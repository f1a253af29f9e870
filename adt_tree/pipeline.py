"""The front door: a loaded model, prompts in, images out.

pipe = Pipeline.from_pretrained("emoji")
out = pipe("noto emoji of red heart", method="adt-tree", sampling=Sampling(temperature=1.0), seed=7)
out.images[0].save("heart.png")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image, ImageChops, ImageDraw

from adt_tree.batch import StepOutput
from adt_tree.engine import Engine
from adt_tree.engine_cache import EngineCache, size_of
from adt_tree.errors import UserError, as_seed, instance, shown
from adt_tree.grid import Grid
from adt_tree.method import METHODS, SELF_DRAFT, Method
from adt_tree.policy import TreeSettings
from adt_tree.records import Decoded, Step, tau
from adt_tree.roles import Request
from adt_tree.settings import Lantern, Sampling
from models.checkpoint.files import expanded
from models.family import DEFAULTS, LoadOptions
from models.loading import load, pick_graphs
from models.model import Model

Prompts = str | Iterable[str]  # a text or texts: a list, an array, a column of a table, a generator
Seeds = int | Iterable[int]  # the first of consecutive seeds, or one seed for each prompt


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a call: one entry per prompt, in the order of the prompts."""

    images: list[Image.Image]  # empty for a model that gives codes alone
    decoded: list[Decoded]

    @property
    def codes(self) -> list[list[int]]:
        """The codebook ids of every image, in raster order."""
        return [image.codes for image in self.decoded]

    @property
    def steps(self) -> list[list[Step]]:
        """The target calls of every image."""
        return [image.steps for image in self.decoded]

    @property
    def stats(self) -> dict[str, float]:
        """tau, which is codes per target call, and the means per image of calls, depth, nodes and seconds."""
        count = len(self.decoded)

        def mean(name: str) -> float:
            return sum(getattr(image, name) for image in self.decoded) / count

        names = ("target_calls", "drafter_calls", "mean_depth", "mean_nodes", "seconds")
        return {"tau": tau(self.decoded), **{name: mean(name) for name in names}}


@dataclass(frozen=True, slots=True)
class TreeView:
    """A draft tree on the host, parents before children. Node 0 is the code that was committed last before
    the step."""

    codes: list[int]
    parents: list[int]  # parents[0] = 0
    depths: list[int]
    confidence: list[float]  # the drafter's log-confidence in the path down to each node; 0 at the root
    path: list[int]  # accepted nodes, from the first level on


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The part of one target call that concerns one image."""

    image: int  # index of its prompt
    position: int  # number of the first code that the step committed; the prompt itself gave code 0
    codes: list[int]  # committed codes: accepted drafts and the code that the target chose, without row ends
    step: Step
    tree: TreeView


class Pipeline:
    """A loaded model, and every method to decode with it."""

    def __init__(self, model: Model, max_engines: int = 2) -> None:
        """model: as models.loading.load gives it. max_engines: number of engines kept for later calls, with
        their caches and, on CUDA, graphs; engines.clear() frees them."""
        self.model, self.engines = model, EngineCache(model, max_engines)
        self._loaded: tuple[str, LoadOptions] | None = None  # the arguments of load()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies a Pipeline of from_pretrained() as its arguments, so that the copy loads the
        model again. UserError for a model that is in memory alone."""
        if self._loaded is None:
            raise UserError(
                f"a Pipeline of {self.model.name} that was not made by from_pretrained cannot be pickled or "
                "copied: make one in each process"
            )
        return _load, (type(self), *self._loaded)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "emoji",
        *,
        drafter: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
        cuda_graphs: bool | None = None,
        options: LoadOptions = DEFAULTS,
    ) -> Pipeline:
        """Loads a model by its name, a folder or a hub id. CheckpointError if it cannot be loaded.

        drafter: folder or hub id of its drafter network, by default the one that lies beside it, if any.
        cuda_graphs: replay the parts of a step as CUDA graphs, by default on CUDA. options: all options of
        loading; the arguments before it replace its fields unless they are None.
        """
        instance("options", options, LoadOptions)
        options = replace(
            options,
            drafter_path=options.drafter_path if drafter is None else expanded(drafter),
            device=str(device or options.device),
            precision=precision or options.precision,
            cuda_graphs=options.cuda_graphs if cuda_graphs is None else cuda_graphs,
        )
        return _load(cls, expanded(model), options)

    @classmethod
    def from_transformers(cls, model: Any, tokenizer: Any, *, options: LoadOptions = DEFAULTS) -> Pipeline:
        """Takes over a Janus, Emu3, Chameleon or GLM-Image model that transformers has loaded.

        tokenizer: its processor or tokenizer. Weights are shared, except queries and keys, whose rows are
        ordered differently here, and on a CPU the layers, which decoding copies into a packed form
        (models.decoder.packed). CheckpointError for any other model, and for options that it does not read.
        """
        from models.layouts.adopted import ADOPTION, adopt

        with ADOPTION:
            adopted = adopt(model, tokenizer, options)
        return cls(replace(adopted, graphs=pick_graphs(options.cuda_graphs, adopted.device.type)))

    def method(
        self,
        name: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: TreeSettings | None = None,
        lantern: Lantern | None = None,
    ) -> Method:
        """Returns a method, by default that of the model. None means the default of the model or method.

        Its other settings are changed as in dataclasses.replace(pipe.method("eagle-2"), verify="rejection");
        a control, and several rows at once, need a tree of a fixed size. A Method is returned as it is.
        UserError for settings that the method does not take, for any setting that is given together with a
        Method, and for a method whose drafter network was not loaded.
        """
        settings: dict[str, Any] = {"sampling": sampling, "tree": tree, "lantern": lantern}
        settings = {setting: value for setting, value in settings.items() if value is not None}
        if isinstance(name, Method):
            if settings:
                setting = next(iter(settings))
                raise UserError(f"{setting}: the Method has this setting already; give only one of the two")
            method = name
        else:
            name = self.default_method if name is None else name
            # AutoTree only for exact methods: others' images would depend on the sizes that it chooses.
            default_tree = self.model.spec.default_tree(name, auto=lantern is None)
            method = Method(name, **{"sampling": self.sampling, "tree": default_tree, **settings})
        if method.spec.network and self.model.drafter_net is None:
            raise UserError(
                f"method {method.name!r}: {self.model.name} was loaded without the drafter network that it "
                f"needs; give one (drafter_path), or choose one of {', '.join(self.methods)}"
            )
        return method

    @property
    def methods(self) -> list[str]:
        """Names of the methods that decode this model in raster order: without a drafter network, those that
        need none."""
        network = self.model.drafter_net is not None
        usual = ((spec, spec.usual_relaxed) for spec in METHODS.values())
        in_order = (spec for spec, relaxed in usual if relaxed is None or relaxed.raster_order)
        return [spec.name for spec in in_order if network or not spec.network]

    @property
    def sampling(self) -> Sampling:
        """The temperature, filters and guidance of calls that give none: those of the command line."""
        return self.model.spec.sampling

    @property
    def default_method(self) -> str:
        """The method of calls that name none: the family's, or self-draft, which gives the same images, where
        that one needs a drafter network and none is loaded. Either is exact."""
        usual = self.model.spec.method
        return usual if usual in self.methods else SELF_DRAFT.name

    def __call__(
        self,
        prompts: Prompts,
        method: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: TreeSettings | None = None,
        lantern: Lantern | None = None,
        seed: Seeds = 0,
        batch_size: int = 1,
    ) -> Output:
        """Returns images of the prompts.

        One seed and prompt give one image under every exact method, alone or in any batch. Prompt n of a
        list has seed + n, unless a seed is given for each. UserError for a method, tree or prompt that does
        not fit the model.
        """
        chosen = self.method(method, sampling=sampling, tree=tree, lantern=lantern)
        decoded = self.decode(chosen, self.requests(prompts, seed), batch_size)
        pictured = () if self.model.codec.missing else decoded
        if not pictured:
            print(f"warning: no images, codes alone: {self.model.codec.missing}", file=sys.stderr)
        return Output([self.image(image.codes) for image in pictured], decoded)

    def stream(
        self,
        prompts: Prompts,
        method: str | Method | None = None,
        *,
        sampling: Sampling | None = None,
        tree: TreeSettings | None = None,
        lantern: Lantern | None = None,
        seed: Seeds = 0,
        batch_size: int = 1,
    ) -> Generator[StreamStep, None, None]:
        """Yields every target call of the images that __call__ would make, as it happens.

        An image is finished when its codes fill the grid. Closing the iterator ends the decoding.
        """
        chosen = self.method(method, sampling=sampling, tree=tree, lantern=lantern)
        if not chosen.raster_order:
            raise UserError(f"method {chosen.label}: it decodes several rows at once; stream() needs one row")
        requests = self.requests(prompts, seed)
        with self.engines.lease(chosen, *size_of(requests, batch_size)) as engine:
            for output in engine.steps(requests):
                views = _views(output)
                for slot, image in output.images:
                    step, view = image.steps[-1], views[slot]
                    first = self.model.grid.number(step.position)
                    yield StreamStep(int(image.name), first, image.codes[first:], step, view)

    def requests(self, prompts: Prompts, seed: Seeds, names: Sequence[str] | None = None) -> list[Request]:
        """Returns one request per prompt, named by its index unless `names` are given. What the user must
        know about a prompt, such as that it was cut, is in the request and one line on stderr.

        Prompt n has seed + n, unless a seed is given for each. UserError for a prompt that does not fit the
        model, and if there are not as many seeds as prompts.
        """
        texts = [prompts] if isinstance(prompts, str) else listed(prompts)
        if not texts:
            raise UserError(f"no prompt in {shown(prompts)}: give a text or several texts")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"prompt {number} is {shown(text)}, not a text: give texts alone")
        numbers, seeds = range(len(texts)), listed(seed)
        if seeds is None:
            seeds = [as_seed(seed) + number for number in numbers]
        if len(seeds) != len(texts):
            raise UserError(f"{len(seeds)} seeds for {len(texts)} prompts: give one seed, or one for each")
        seeds = [as_seed(seed) for seed in seeds]
        encoded = self.model.encode_all(texts)
        parts = zip(names or map(str, numbers), encoded, seeds, strict=True)
        requests = [Request(name, prompt, seed, warnings=prompt.warnings) for name, prompt, seed in parts]
        warned = [request for request in requests if request.warnings]
        if warned:
            others = f" (so for {len(warned)} prompts)" if len(warned) > 1 else ""
            print(f"warning: prompt {warned[0].name}: {warned[0].warnings[0]}{others}", file=sys.stderr)
        return requests

    def engine(self, method: Method, requests: Sequence[Request], batch_size: int = 1) -> Engine:
        """Returns an engine for the caller alone, with room for these requests, batch_size in flight.
        UserError as in method()."""
        return self.engines.take(self.method(method), *size_of(requests, batch_size))[1]

    def decode(
        self, method: Method, requests: Sequence[Request], batch_size: int, grid: Grid | None = None
    ) -> list[Decoded]:
        """Returns the images of requests, in their order. grid: of their codes; None: the model's."""
        with self.engines.lease(method, *size_of(requests, batch_size), grid) as engine:
            by_name = {image.name: image for image in engine.decode(requests)}
        return [by_name[request.name] for request in requests]

    def image(self, codes: list[int]) -> Image.Image:
        """Returns the RGB picture of codes in raster order. UserError for codes that are no image's."""
        size, count = self.model.grid.size, self.model.num_codes
        if len(codes) != size or not all(0 <= code < count for code in codes):
            raise UserError(f"codes {shown(codes)}: give {size} codes from 0 to {count - 1}")
        return self.model.image(codes)

    def partial_image(self, codes: list[int]) -> Image.Image:
        """Returns the RGBA picture of the first codes of an image, transparent where the others will be.

        The pixel decoder takes a whole grid and normalises over all of it, so the known codes are repeated to
        fill the grid: any constant filling would change the colours of the known part.
        """
        grid, raster = self.model.grid, self.model.grid.image
        before, seen = codes[: grid.starts[-1]], codes[grid.starts[-1] :]
        filled = ((seen or [0]) * raster.size)[: raster.size]
        picture = self.image([*before, *[0] * (grid.starts[-1] - len(before)), *filled]).convert("RGBA")
        row, column = divmod(len(seen), raster.width)
        cell_height, cell_width = picture.height / raster.height, picture.width / raster.width
        top, bottom = round(row * cell_height), round((row + 1) * cell_height)
        left = round(column * cell_width)
        mask = Image.new("L", picture.size, 255)
        pen = ImageDraw.Draw(mask)
        pen.rectangle((left, top, picture.width, bottom - 1), fill=0)  # the rest of the row of the next code
        pen.rectangle((0, bottom, picture.width, picture.height), fill=0)  # all rows below
        picture.putalpha(ImageChops.multiply(picture.getchannel("A"), mask))
        return picture


def _load(cls: type[Pipeline], model: str, options: LoadOptions) -> Pipeline:
    """Returns a Pipeline, of a subclass perhaps, that pickles as these arguments."""
    pipe = cls(load(model, options))
    pipe._loaded = model, options
    return pipe


def listed(values: Any) -> list[Any] | None:
    """Returns the entries of an iterable. None for a value that is none, for a text or bytes, for sets and
    dictionaries, which are in no order or hold more than their keys."""
    try:
        return None if isinstance(values, str | bytes | bytearray | Set | Mapping) else list(values)
    except TypeError:
        return None


def _views(output: StepOutput) -> list[TreeView]:
    """Returns the trees of all slots on the host, by one transfer; fp64 holds all their integers exactly."""
    tree, verdict = output.tree, output.verdict
    confidence = torch.zeros_like(tree.codes) if tree.confidence is None else tree.confidence
    parts = (tree.codes, tree.parents, tree.depths, tree.valid, confidence)
    table = torch.stack([part.double() for part in parts], dim=1).tolist()
    views = []
    for rows, path, count in zip(table, verdict.path.tolist(), verdict.count.tolist(), strict=True):
        nodes = [node for node, valid in enumerate(rows[3]) if valid]
        place = {node: number for number, node in enumerate(nodes)}
        views.append(
            TreeView(
                codes=[int(rows[0][node]) for node in nodes],
                parents=[place[int(rows[1][node])] for node in nodes],
                depths=[int(rows[2][node]) for node in nodes],
                confidence=[rows[4][node] for node in nodes],
                path=[place[node] for node in path[1:count]],
            )
        )
    return views
