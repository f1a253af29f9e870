"""bench: times methods at several temperatures, tree sizes, batch sizes and options on the same prompts.

Each combination of these is one configuration; combinations that mean the same are measured once.
eval.harness measures every configuration beside the AR baseline of the same temperature and batch size. The
same command continues an interrupted run.
"""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import UserError
from adt_tree.fastest_size import AutoTree
from adt_tree.method import LANTERN_SUFFIX, METHODS, Method, all_names, split_name
from cli.method_options import (
    LANTERN_VALUES,
    METHOD_OPTIONS,
    DecodingOptions,
    MethodSettings,
    method_from,
    takes,
    total_token,
)
from cli.options import DrafterOptions, FileOptions, PromptOptions, RunOptions, sampling_of
from lab.settings import CONTROLS, Control
from models.registry import PUBLISHED, SPECS
from storage.command_line import CommandOptions, Parser, as_written, declare, option
from storage.prompts import BENCH_FILE, Prompt, load_prompts, make_requests, repeated

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline
    from adt_tree.roles import Request
    from eval.harness import Configuration, Decodes
    from models.model import Model

PAPER = ("eagle-1", "eagle-2", "adt-tree", "eagle-2-lantern", "adt-tree-lantern")
REFERENCED = tuple(name for name, spec in SPECS.items() if spec.reference)  # models for --reference
# Options on which no measurement depends.
NOT_MEASURED = ("output_dir", "config", "debug", "profile", "untimed", "trust_torchscript")
PROFILED = 4  # images that --profile decodes
RANDOM_CODES = 256  # codes that --random_weights decodes, unless --codes says otherwise
# Options that --vary does not take, and those that it takes. --total_token takes several values itself.
OTHERS = ("total_token", "drafter_path", "lantern")
VARIABLE = (*LANTERN_VALUES, *(name for name in METHOD_OPTIONS if name not in OTHERS))


def _varied(text: str) -> tuple[str, tuple[Any, ...]]:
    """Returns the option and the values of KEY=A,B. Each value is checked as one of that option."""
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE,VALUE such as adt_beta=0.3,0.5")
    if name not in VARIABLE:
        raise ArgumentTypeError(f"{name!r} cannot be varied; choose one of {', '.join(VARIABLE)}")
    try:
        parser = Parser(DecodingOptions, "")
        return name, tuple(parser.parse([f"--{name}", value])[name] for value in values.split(","))
    except UserError as error:
        raise ArgumentTypeError(str(error).partition(" (see")[0]) from None


# Options that random weights do not read.
OF_CHECKPOINTS = {
    item.name for group in (FileOptions, DrafterOptions, PromptOptions) for item in fields(group)
} - {"num_images", "images_per_prompt", "random_seed"}


@declare("what is measured")
class Options(MethodSettings, PromptOptions, RunOptions, CommandOptions):
    """The AR baseline and every combination of --methods, --temperatures, --total_token, --batch_size and
    --vary that differs from the others."""

    batch_size: tuple[int, ...] = (1,)
    total_token: tuple[int | str, ...] = ()
    num_images: int = 16
    output_dir: str = "runs/bench"
    methods: tuple[str, ...] = option(
        "; ".join(f"{spec.name}: {spec.about}" for spec in METHODS.values())
        + f"; NAME{LANTERN_SUFFIX}: the method with relaxed acceptance",
        PAPER,
        choices=all_names(),
        unit="METHOD",
    )
    temperatures: tuple[float, ...] = option(
        "temperatures at which every method is measured", (0.0, 1.0), unit="T", least=0, most=100
    )
    vary: tuple[tuple[str, tuple[Any, ...]], ...] = option(
        "an option of LANTERN, trees, relaxed rivals or several rows at once, and the values to measure it "
        "at, such as adt_beta=0.3,0.5; every method that reads the option takes them in turn",
        (),
        unit="KEY=A,B",
        read=_varied,
    )
    controls: tuple[str, ...] = option(
        "also measure two bounds on the speed of every exact method, which give no image: accept-none "
        "accepts no draft, accept-all accepts the first child of every node",
        (),
        choices=CONTROLS,
    )
    warmup: int = option("images that each configuration generates before timing", 1, unit="IMAGES", least=0)
    reference: str | None = option(
        "also time the same checkpoint in transformers' own implementation, with a static cache",
        choices=("transformers",),
    )
    random_weights: bool = option(
        f"time a model of the published dimensions ({', '.join(PUBLISHED)}) with random weights on the "
        "rows in the middle of an image; no checkpoint is read",
        False,
        reads={True: ("layers", "codes"), False: sorted(OF_CHECKPOINTS)},
    )
    codes: int | None = option(
        "codes of these rows with --random_weights; an image's own number or more: all of its rows (default: "
        f"{RANDOM_CODES})",
        unit="CODES",
        least=1,
    )
    layers: int | None = option(
        "layers of the decoder with --random_weights; fewer take less time and memory (default: the "
        "published number)",
        unit="LAYERS",
        least=1,
    )
    untimed: bool = option(
        "leave times out of the tables, because the machine does other work meanwhile", False
    )
    quality: bool = option(
        "also measure ar at other seeds, and score all images: how likely they are under the model and, for "
        "the embedded model, how many are recognised (needs requirements-eval.txt)",
        False,
    )
    profile: bool = option(
        f"then split the time of {PROFILED} images into prefill, noise, target, drafter, tree, verify, "
        "commit, pixels and host",
        False,
    )


def run(options: Options) -> None:
    """Measures, stores the result and prints its table. The last line printed is one JSON document."""
    chosen = configurations(options)
    check(options)
    from cli.model_from_options import recogniser_of, resolved_options
    from eval import columns, tables
    from eval.harness import measure
    from eval.profile import compile_seconds, drafter_share, memory, profile
    from eval.quality import score
    from models.checkpoint.files import json_text, write_json
    from storage.measurements import Measurements
    from storage.ownership import owned

    pipe, prompts = load(options, any(method.spec.network for method in chosen.values()))
    own = sampling_of(options, pipe.model.spec)  # with the checkpoint's values where options are left out
    for key, method in chosen.items():
        chosen[key] = replace(method, sampling=replace(own, temperature=method.sampling.temperature))
    recogniser = recogniser_of(options) if options.quality and not options.random_weights else None
    decoders, requests = prepare(options, pipe, chosen, prompts)
    model = pipe.model
    environment, stored_options = describe(model), resolved_options(options, model)
    fingerprint = {
        **{name: value for name, value in stored_options.items() if name not in NOT_MEASURED},
        **{name: value for name, value in environment.items() if name not in ("commit", "date", "dirty")},
        "prompts": [(prompt.name, prompt.text) for prompt in prompts],
    }
    folder = Path(options.output_dir)
    with owned(folder):
        store = Measurements(folder, fingerprint)
        store.start(stored_options)
        measured = measure(decoders, requests, store, options.warmup, model.device)
    scores, texts = None, {prompt.name: prompt.text for prompt in prompts}
    if options.quality:
        guidance = next(iter(chosen.values())).sampling.guidance
        scores = score(model, guidance, requests, texts, measured, recogniser)
    share = drafter_share(model)
    result: dict[str, Any] = {
        "command": f"python main.py {shlex.join(sys.argv[1:])}",
        "environment": environment,
        "options": stored_options,
        "prompts": len(prompts),
        "rows": [
            columns.row(
                columns.Comparison(item, measured[item.name], measured[item.baseline], scores, texts, share)
            )
            for item in decoders
        ],
    }
    engines = {configuration.name: decoders[configuration] for configuration in chosen}
    if model.device.type == "cuda":
        result["memory"] = memory(model, engines.values())
    if options.compile:
        result["compile_s"] = compile_seconds()
    if options.profile:
        result |= profile(engines, requests[:PROFILED], model)
    write_json(folder / tables.STORED, result)
    print(f"{tables.text_of(result)}\n\n{columns.LEGEND}")
    print(json_text(result))


def configurations(options: Options) -> dict[Configuration, Method]:
    """Returns the configurations to measure and their methods, the AR baseline of every temperature first.

    A value of --vary that a method cannot take is left out for that method. Raises UserError for options that
    a method refuses, and for an option that no method reads.
    """
    from eval.harness import Configuration

    distinct: dict[tuple[Method, int], Configuration] = {}
    read: set[str] = set()  # options that some method reads
    varied = values_of(options)
    baseline = ("ar", {"row_start": None})  # in raster order; ar among --methods reads --row_start
    entries: list[tuple[str, dict[str, Any]]] = [baseline, *((name, {}) for name in options.methods)]
    every = product(options.temperatures, entries, options.total_token or (None,), product(*varied.values()))
    for temperature, (name, fixed_values), nodes, pairs in every:
        if not all(takes(METHODS[split_name(name)[0]], *pair) for pair in pairs):
            continue
        values = {"temperature": temperature, "total_token": nodes, **dict(pairs), **fixed_values}
        chosen = options_of(options, name, values)
        read |= {key for key in (*VARIABLE, *OTHERS) if as_written(chosen, key)}
        method = method_from(chosen)
        # The varied options that this method reads; tables show them.
        shown = tuple(pair for pair in pairs if getattr(chosen, pair[0]) is not None)
        bounds = options.controls if method.exact and method.drafting and method.spec.verify else ()
        for control, batch_size in product((None, *bounds), options.batch_size):
            # A control accepts wrong drafts, so an AutoTree could learn nothing from its steps.
            fixed = bool(control) and isinstance(method.tree, AutoTree)
            tree = SPECS[options.model].default_tree(method.name) if fixed else method.tree
            final = replace(method, tree=tree, relaxed=Control(control) if control else method.relaxed)
            size = total_token(tree)
            configuration = Configuration(final.label, temperature, batch_size, size, shown, final.exact)
            distinct.setdefault((final, batch_size), configuration)
    if options.controls and not any(isinstance(method.relaxed, Control) for method, _ in distinct):
        controls = as_written(options, "controls")
        raise UserError(f"{controls}: none of --methods is exact and drafts; leave it out")
    given = {name: as_written(options, name) for name in (*VARIABLE, *OTHERS)}
    for name, written in (given | {name: words(pairs) for name, pairs in varied.items()}).items():
        if written and name not in read:
            names = " ".join(dict.fromkeys(("ar", *options.methods)))
            raise UserError(f"{written}: none of --methods {names} reads it; leave it out")
    return {configuration: method for (method, _), configuration in distinct.items()}


def words(pairs: Sequence[tuple[str, Any]]) -> str:
    """Returns an option of --vary and its values as they were written."""
    return f"--vary {pairs[0][0]}={','.join(str(value) for _, value in pairs)}"


def values_of(options: Options) -> dict[str, list[tuple[str, Any]]]:
    """Returns the options of --vary, each with its pairs of name and value. Raises UserError for a method
    that takes none of an option's values."""
    varied: dict[str, list[tuple[str, Any]]] = {}
    for name, values in options.vary:
        varied.setdefault(name, []).extend((name, value) for value in values)
    for pairs in varied.values():
        for method in options.methods:
            if not any(takes(METHODS[split_name(method)[0]], *pair) for pair in pairs):
                raise UserError(f"{words(pairs)}: method {method} takes none of these values; leave it out")
    return varied


def options_of(options: Options, name: str, values: dict[str, Any]) -> DecodingOptions:
    """Returns the options for one method, as generate_images has them, without those that the method does
    not read.

    name: one of --methods. values: the options that bench changes in turn.
    """
    shared = {item.name: getattr(options, item.name, item.default) for item in fields(DecodingOptions)}
    plain, lantern = split_name(name)
    chosen = {"method": plain, "lantern": lantern, "batch_size": 1}
    method_options = DecodingOptions(**{**shared, **values, **chosen})
    ignored: dict[str, Any] = dict.fromkeys(method_options.unread())
    return replace(method_options, **ignored)


def check(options: Options) -> None:
    """Raises UserError for --random_weights or --reference where the model or the other options do not allow
    it."""
    if options.random_weights and options.model not in PUBLISHED:
        models = ", ".join(PUBLISHED)
        raise UserError(f"--random_weights with --model {options.model}: choose --model among {models}")
    if options.reference is None:
        return
    reference = f"--reference {options.reference}"
    if options.model not in REFERENCED or options.random_weights:
        raise UserError(
            f"{reference}: only checkpoints of --model {' and '.join(REFERENCED)} have one; leave it out"
        )
    if 1 not in options.batch_size:
        raise UserError(f"{reference}: it makes one image at a time; add 1 to --batch_size, or leave it out")


def load(options: Options, need_drafter: bool) -> tuple[Pipeline, list[Prompt]]:
    """Returns the model and the prompts.

    With --random_weights the text of a prompt is its number of tokens, such as "64"; random_model makes that
    many tokens of it.
    """
    from cli import model_from_options
    from storage.process import refuse_several

    refuse_several()
    if not options.random_weights:
        prompts = load_prompts(options, BENCH_FILE)
        return model_from_options.load(options, need_drafter), prompts
    from adt_tree.pipeline import Pipeline
    from eval.random_model import middle_of_image
    from models.loading import pick_device, pick_graphs, pick_precision

    device = pick_device(options.device)
    precision = pick_precision(options.precision, device, SPECS[options.model])
    graphs, compiled = pick_graphs(options.cuda_graphs, device), model_from_options.compiled(options)
    codes = options.codes or RANDOM_CODES
    model, before = middle_of_image(options.model, precision, device, options.layers, codes)
    prompts = [Prompt(str(row), str(before), row) for row in range(max(1, options.num_images))]
    pipe = Pipeline(replace(model, graphs=graphs, compiled=compiled))
    return pipe, repeated(prompts, options.images_per_prompt)


def prepare(
    options: Options, pipe: Pipeline, chosen: dict[Configuration, Method], prompts: Sequence[Prompt]
) -> tuple[dict[Configuration, Decodes], list[Request]]:
    """Returns the decoder of every configuration, and the requests. Raises UserError if the model refuses a
    method or a prompt."""
    from eval.quality import OtherSeeds
    from models.loading import find_target

    requests = make_requests(pipe, prompts, options.random_seed)
    decoders: dict[Configuration, Decodes] = {}
    for configuration, method in chosen.items():
        decoders[configuration] = pipe.engine(method, requests, configuration.batch_size)
        if options.quality and configuration.name == configuration.baseline and not method.greedy:
            again = pipe.engine(method, requests, configuration.batch_size)
            decoders[configuration.other_seeds] = OtherSeeds(again)
    if options.reference:
        from cli.model_from_options import load_options
        from eval import baseline  # imports transformers, which takes seconds

        folder = find_target(pipe.model.spec, load_options(options))
        samplings = [method.sampling for item, method in chosen.items() if item.name == item.baseline]
        longest = max(request.prompt.length for request in requests)
        decoders |= baseline.decoders(folder, pipe.model, samplings, longest)
    return decoders, requests


def describe(model: Model) -> dict[str, Any]:
    """Returns the facts that a repetition needs: commit, date, device, versions, precision, weights, grid."""
    from storage.process import environment

    return {
        **environment(model.device.type),
        "precision": model.precision,
        "weights": model.weights_sha,
        "drafter": model.drafter_sha,
        "grid": [model.grid.height, model.grid.width],
    }
