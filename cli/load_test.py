"""load_test: compares the images that a load test stored with those that Pipeline makes of the same requests.

serve/locustfile.py sends the requests, times them and stores the images.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ModelOptions, check_model, check_pixels
from cli.parser import declare, option
from models.checkpoint.files import reading

if TYPE_CHECKING:
    from adt_tree.method import Method
    from adt_tree.pipeline import Pipeline
    from serve.image_request import ImageRequest


@declare
class Options(ModelOptions):
    """load"""

    images: str = option("folder that `locust --save` has filled", "runs/load/images", unit="DIR")


def run(options: Options) -> None:
    """Prints a line for every image that differs; the last line is one JSON document.

    Ends with status 1 if an image differs. Raises UserError for a folder without images, and as
    read_request().
    """
    files = sorted(Path(options.images).glob("*.json"))
    if not files:
        raise UserError(f"--images {options.images}: no images there; `locust --save` stores them")
    check_model(options)
    check_pixels(options, "load_test")
    from cli.model_from_options import load_with_drafter_if_any
    from storage.run_folder import png_bytes

    pipe, groups = load_with_drafter_if_any(options), defaultdict(list)
    for file in files:
        method, request = read_request(file, pipe)
        groups[method].append((file, request))
    different = []
    for method, group in groups.items():
        requests = [request for _, request in group]
        texts, seeds = [request.prompt for request in requests], [request.seed or 0 for request in requests]
        output = pipe(texts, method, seed=seeds, batch_size=options.batch_size)
        for (file, _), picture in zip(group, output.images, strict=True):
            if png_bytes(picture) != file.with_suffix(".png").read_bytes():
                different.append(file.stem)
                print(f"{file}: the served image differs from the one made offline")
    print(json.dumps({"images": len(files), "different": different}))
    if different:
        sys.exit(1)


def read_request(file: Path, pipe: Pipeline) -> tuple[Method, ImageRequest]:
    """Returns a stored request and its method. Raises UserError if it is damaged, or if a service with this
    model cannot have answered it."""
    from serve.api_errors import ApiError
    from serve.image_request import check_model, method_of, parse

    with reading(file, "give --model and the other options of the service"):
        try:
            request = parse(file.read_bytes())
            check_model(request, pipe)
            return method_of(request, pipe), request
        except ApiError as error:
            raise ValueError(str(error)) from None
