"""generate_train_data: generates images from prompts and stores their codes, as data for train_drafter.

A drafter must predict what the target generates under guidance, so it learns from such images.
"""

from __future__ import annotations

import time
from pathlib import Path

from adt_tree.method import Method
from cli.options import (
    DecoderOptions,
    PromptOptions,
    SamplingOptions,
    ShardOptions,
    check_guided,
    sampling_of,
)
from models.checkpoint.files import json_text
from models.registry import SPECS
from storage.command_line import CommandOptions, declare
from storage.prompts import DRAFTER_FILE, load_prompts, make_requests


@declare("run", {"data_path": "prompt", "num_samples": "num_images"})
class Options(DecoderOptions, PromptOptions, SamplingOptions, ShardOptions, CommandOptions):
    """The model, the prompts, and the data that they make."""

    batch_size: int = 16
    num_images: int = -1


def run(options: Options) -> None:
    """Generates every image that the folder does not hold yet. The last line printed is one JSON document."""
    if options.features:
        check_guided(options, "--features")
    sampling_of(options, SPECS[options.model])  # refuses bad numbers before weights are read
    prompts = load_prompts(options, DRAFTER_FILE)
    import torch
    from tqdm import tqdm

    from cli.model_from_options import load_without_drafter
    from training.shards import StoredImage, origin, shard_writer
    from training.teacher import features

    pipe = load_without_drafter(options)
    model = pipe.model
    method = Method("ar", sampling_of(options, model.spec))
    record = {name: getattr(method.sampling, name) for name in ("temperature", "top_k", "top_p")}
    record |= {"cfg": method.sampling.guidance}
    record |= {"random_seed": options.random_seed, "precision": model.precision}
    facts = {**origin(model, generated=True, features=options.features), **record}
    texts = {prompt.name: prompt.text for prompt in prompts}
    started = time.perf_counter()
    with shard_writer(Path(options.output_dir), facts, options.shard_size) as writer:
        names = set(writer.missing(texts))
        pending = [prompt for prompt in prompts if prompt.name in names]
        requests = make_requests(pipe, pending, options.random_seed) if pending else []
        encoded = {request.name: request.prompt for request in requests}
        images = pipe.engine(method, requests, options.batch_size).decode(requests) if pending else ()
        for image in tqdm(images, total=len(requests), unit="image", disable=not pending):
            branches: list[torch.Tensor] = []
            if options.features:
                branches = features(model, encoded[image.name], torch.tensor(image.codes))
            writer.add(StoredImage(image.name, texts[image.name], image.seed, image.codes, branches))
    wall = time.perf_counter() - started
    counts = {"images": len(prompts), "skipped": len(prompts) - len(pending), "wall_s": round(wall, 1)}
    print(json_text({**counts, "output_dir": options.output_dir}))
