"""generate_images: generates images from prompts, with statistics and maps. The same command continues a
stopped run.

Under a launcher (accelerate launch, torchrun) process r of n takes every n-th prompt. The number of processes
does not change an image, which depends on its own seed alone. The last process to finish prints the summary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adt_tree.errors import UserError
from adt_tree.method import Method
from cli.flags import with_flags
from cli.method_options import DecodingOptions, method_from
from cli.options import PromptOptions, RunOptions
from models.checkpoint.files import json_text
from storage.command_line import CommandOptions, declare, option, refuse
from storage.prompts import (
    DEFAULT_END,
    Prompt,
    held_out_texts,
    load_prompts,
    make_requests,
)

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline
    from adt_tree.records import Decoded
    from models.model import Model
    from storage.run_folder import RunFolder

# Field of the summary -> key of an image's statistics, of which it is the mean.
MEANS = {name: name for name in ("target_calls", "drafter_calls", "mean_depth", "mean_nodes")}
MEANS |= {"latency_s": "latency"}


@declare("maps")
class Options(DecodingOptions, PromptOptions, RunOptions, CommandOptions):
    """The method, the prompts, and what is stored."""

    heatmaps: int = option("number of first images that get a map of their trees", 4, unit="IMAGES", least=0)
    record: int = option(
        "number of first images that are decoded again, one at a time, with every step stored for the races "
        "of report",
        0,
        unit="IMAGES",
        least=0,
    )


def run(options: Options) -> None:
    """Generates the images that the folder lacks; the last line printed is one JSON document."""
    method, prompts = method_from(options), load_prompts(options)
    maps = method.drafting and method.raster_order
    if options.heatmaps and not maps:
        reason = "decodes several rows at once" if not method.raster_order else "drafts no trees"
        refuse(options, "heatmaps", f"method {method.name} {reason}")
    if options.record and not method.raster_order:
        refuse(options, "record", "a race shows images that grow in raster order")
    from cli.model_from_options import load, resolved_options
    from models.checkpoint.files import write_json
    from storage.ownership import owned
    from storage.process import worker
    from storage.run_folder import RECORDS, STATISTICS, RunFolder

    rank, count = worker()
    share = [prompt.name for prompt in prompts[rank::count]]
    if not share:  # there are fewer prompts than processes
        return
    pipe = load(options, method.spec.network)
    method, model = method_from(options, pipe.model.spec), pipe.model
    why_no_pixels = model.missing_for_pixels
    if options.heatmaps and why_no_pixels:
        refuse(options, "heatmaps", "there are no pixels for maps")
    if options.record and model.codec.missing:
        raise UserError(f"--record {options.record}: a race shows pixels, and {model.codec.missing}")
    root, facts = Path(options.output_dir), fingerprint(options, method, model)
    folder = RunFolder(root, prompts, facts, model.grid, model.num_codes, pixels=not why_no_pixels)
    damaged = folder.forget_damaged(share)
    skipped = sum(map(folder.is_finished, folder.prompts))
    missing = [name for name in share if not folder.is_finished(name)]
    images = decode(options, method, pipe, folder, missing)
    with owned(root, share):
        folder.start(resolved_options(options, model))  # nothing is refused from here on
        if damaged:
            print(f"warning: {len(damaged)} damaged files are made anew, {damaged[0]} first", file=sys.stderr)
        started = time.perf_counter()
        store(pipe, images, folder, missing, silent=rank > 0)
        wall = time.perf_counter() - started
        if count > 1:
            print(f"process {rank} of {count}: {len(missing)} images")
        if not folder.complete or (count > 1 and folder.forget_damaged(folder.prompts)):
            return  # other processes still make images; the last of them prints the summary
        statistics = folder.statistics()
        if why_no_pixels:
            reason = with_flags(why_no_pixels, Options)
            print(f"{root}: {RECORDS}/NAME.json holds the codes of each image; {reason}")
        else:
            plot(options, method, pipe, folder, prompts)
        record(options, method, pipe, folder, prompts)
        window = (options.start_idx, options.end_idx or DEFAULT_END)
        write_json(root / STATISTICS.format(*window), statistics)
    summary = summarise(statistics, skipped, wall)
    print("\n".join(f"  {name:<14} {value}" for name, value in summary.items()))
    print(json_text({**summary, "output_dir": options.output_dir}))


def fingerprint(options: Options, method: Method, model: Model) -> dict[str, Any]:
    """Returns everything that changes an image or its record: all runs in one folder must share it."""
    return {
        "method": method.name,
        **{name: str(getattr(method, name)) for name in ("tree", "verify", "rules", "lantern")},
        **asdict(method.sampling),
        # As they are in use, so that a default may also be given.
        "seed_cells": method.copied_cells,
        "relaxed": str(method.relaxed_rule),
        "model": options.model,
        "grid": [astuple(raster) for raster in model.grid.rasters],
        "weights": model.weights_sha,
        "drafter_weights": model.drafter_sha,
        "precision": model.precision,
        "device": model.device.type,
        "random_seed": options.random_seed,
    }


def decode(
    options: Options, method: Method, pipe: Pipeline, folder: RunFolder, missing: Sequence[str]
) -> Iterator[Decoded]:
    """Returns an iterator that generates the missing images, by their names, that have no record yet.

    Raises every UserError before it returns. The iterator alone holds the caches, so that their memory is
    free once it has ended.
    """
    prompts = [folder.prompts[name] for name in missing if not folder.has_record(name)]
    if not prompts:
        return iter(())
    requests = make_requests(pipe, prompts, options.random_seed)
    # A run with other prompts may have generated an image by the time that its turn comes.
    pending = (request for request in requests if not folder.has_record(request.name))
    return pipe.engine(method, requests, options.batch_size).decode(pending)


def store(
    pipe: Pipeline, images: Iterable[Decoded], folder: RunFolder, missing: Sequence[str], silent: bool
) -> None:
    """Stores the codes of each image as soon as it is generated, then its pixels if the model has them.

    The pixels of the last image, and of images whose codes an earlier run stored, are decoded after the
    caches are freed.
    """
    from tqdm import tqdm

    without_codes = sum(not folder.has_record(name) for name in missing)
    codes = calls = number = 0
    with tqdm(total=len(missing), unit="image", disable=silent, smoothing=0.1) as bar:
        for number, decoded in enumerate(images, start=1):
            folder.add(decoded)
            codes += sum(step.accepted + 1 for step in decoded.steps)
            calls += decoded.target_calls
            bar.set_postfix_str(f"tau {codes / max(calls, 1):.2f}", refresh=False)
            if number < without_codes:
                decode_pixels(pipe, folder, decoded.name)
                bar.update()
        pipe.engines.clear()
        for name in missing:
            if not folder.is_finished(name):
                decode_pixels(pipe, folder, name)
                bar.update()
        bar.update(len(missing) - bar.n)  # the last image, if it has no pixels


def decode_pixels(pipe: Pipeline, folder: RunFolder, name: str) -> None:
    """Decodes the codes in an image's record and stores the picture, if the model has pixels."""
    from storage.process import synchronise

    model = pipe.model
    if model.missing_for_pixels:
        return
    record, started = folder.read(name), time.perf_counter()
    if model.diffusion is None:
        image = pipe.image(record.codes)
    else:
        prompt, seed = record.statistics["prompt"], record.statistics["seed"]
        image = model.diffusion.image(record.codes, model.grid, prompt, seed)
    synchronise(model.device)
    folder.finish(record, image, time.perf_counter() - started)


def plot(
    options: Options, method: Method, pipe: Pipeline, folder: RunFolder, prompts: Sequence[Prompt]
) -> None:
    """Writes the contact sheet and, if the method drafts, the maps of the first images. A picture that cannot
    be drawn is one line on stderr: the images are there."""
    from eval import figures
    from storage.run_folder import file_name

    def draw(write: Callable[..., None], *arguments: Any, path: Path) -> None:
        try:
            write(*arguments, path)
        except Exception as error:  # of a package, a font, a picture or the disk
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{path}: not drawn: {cause}; the images are stored", file=sys.stderr)

    images = [(folder.png(prompt.name), prompt.text) for prompt in prompts]
    draw(figures.contact_sheet, images, held_out_texts(), path=folder.root / "contact_sheet.png")
    for prompt in prompts[: options.heatmaps] if method.drafting and method.raster_order else ():
        path = folder.root / f"heatmap_{file_name(prompt.name)}.png"
        steps, picture = folder.read(prompt.name).steps, folder.png(prompt.name)
        draw(figures.heatmap, picture, prompt.text, steps, pipe.model.grid, path=path)


def record(
    options: Options, method: Method, pipe: Pipeline, folder: RunFolder, prompts: Sequence[Prompt]
) -> None:
    """Writes recordings of the first images, except for those that an earlier run has written."""
    from demo import recording
    from storage.run_folder import file_name

    for prompt in prompts[: options.record]:
        path = folder.root / f"{recording.PREFIX}{file_name(prompt.name)}.json"
        if not path.exists():
            seed = folder.read(prompt.name).statistics["seed"]
            recording.write(path, recording.record(pipe, method, prompt.text, seed))


def summarise(entries: dict[str, dict[str, Any]], skipped: int, wall: float) -> dict[str, Any]:
    """Returns means over images, and tau over all target calls.

    entries: statistics by image. skipped: number of images of earlier runs. wall: seconds of this run.
    """
    from storage.run_folder import tau_of

    count, generated = len(entries), len(entries) - skipped
    means = {
        name: round(sum(entry[key] for entry in entries.values()) / count, 4) for name, key in MEANS.items()
    }
    return {
        "images": count,
        "skipped": skipped,
        "tau": round(tau_of(entries.values()), 4),
        **means,
        "wall_s": round(wall, 3),
        "images_per_s": round(generated / wall, 4) if generated else None,
    }
