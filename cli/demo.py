"""demo: serves a page where two methods decode one prompt and race, with the draft tree of every step.

The page decodes for one visitor at a time; the others wait in gradio's queue. Without --host it is served to
this machine alone. It needs no network.
"""

from __future__ import annotations

import os

from adt_tree.errors import UserError
from cli.options import ModelOptions, check_pixels
from storage.command_line import CommandOptions, declare, option


@declare("page")
class Options(ModelOptions, CommandOptions):
    """The model, and the address of the page."""

    port: int = option("port of the page; 0: the first free one from 7860 on", 7860, least=0, most=65535)
    host: str = option(
        "address to serve at; 0.0.0.0: every address of this machine", "127.0.0.1", unit="ADDRESS"
    )


def run(options: Options) -> None:
    """Serves the page until it is interrupted. Raises UserError without gradio, or if the port is taken."""
    check_pixels(options, "the page")
    if options.batch_size != 1:
        raise UserError(f"--batch_size {options.batch_size}: the page decodes one image at a time")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it when it is imported.
    # torch reads OMP_NUM_THREADS when it is imported. gradio decodes in another thread than the one that
    # loaded the model, and OpenMP gives each thread its own team on the same cores. The teams wait for each
    # other: an AR step takes three times as long, which would flatter the method with fewer steps.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import gradio
    except ImportError as error:
        raise UserError(
            f"demo needs gradio ({error}): `bash scripts/setup.sh requirements-demo.txt` installs it"
        ) from None
    from cli.model_from_options import load_with_drafter_if_any
    from demo.app import serve

    pipe = load_with_drafter_if_any(options)
    print(f"{options.model} is loaded and warms up", flush=True)
    try:
        page, address = serve(pipe, options.host, options.port)
    except (OSError, ValueError, gradio.exceptions.Error) as error:
        raise UserError(f"--host {options.host} --port {options.port}: {error}") from None
    print(f"The page is at {address}. Ctrl-C ends it.", flush=True)
    page.block_thread()
