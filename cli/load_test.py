"""load_test: compares the images that a load test stored with those that Pipeline makes of the same requests.

serve/locustfile.py sends the requests, times them and stores the images.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from adt_tree.errors import UserError
from cli.options import ModelOptions, check_model, check_pixels
from cli.parser import declare, option


@declare
class Options(ModelOptions):
    """load"""

    images: str = option("folder that `locust --save` has filled", "runs/load/images", unit="DIR")


def run(options: Options) -> None:
    """Prints a line for every image that differs; the last line is one JSON document.

    Ends with status 1 if an image differs. Raises UserError for a folder without images.
    """
    files = sorted(Path(options.images).glob("*.json"))
    if not files:
        raise UserError(f"--images {options.images}: no images there; `locust --save` stores them")
    check_model(options)
    check_pixels(options, "load_test")
    from cli.model_from_options import load_with_drafter_if_any
    from eval.runs.run_folder import png_bytes
    from serve.image_request import ImageRequest, method_of, parse

    pipe, groups = load_with_drafter_if_any(options), defaultdict(list)
    for file in files:
        request = parse(file.read_bytes())
        groups[method_of(request, pipe)].append((file, request))
    different = []
    for method, group in groups.items():
        requests: list[ImageRequest] = [request for _, request in group]
        texts, seeds = [request.prompt for request in requests], [request.seed or 0 for request in requests]
        output = pipe(texts, method, seed=seeds, batch_size=options.batch_size)
        for (file, _), picture in zip(group, output.images, strict=True):
            if png_bytes(picture) != file.with_suffix(".png").read_bytes():
                different.append(file.stem)
                print(f"{file}: the served image differs from the one made offline")
    print(json.dumps({"images": len(files), "different": different}))
    if different:
        sys.exit(1)
