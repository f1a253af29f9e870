"""demo: a page where two methods race, where every step can be looked into, and a sheet of many prompts.

The page asks `Pipeline.stream` for steps and decodes for one visitor at a time; whoever comes meanwhile
waits in gradio's queue. It is served to this machine alone unless --host says otherwise, and asks nothing of
a network.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from adt_tree.errors import UserError
from cli.options import ModelOptions, check_model
from cli.parser import declare, option

if TYPE_CHECKING:
    from adt_tree.pipeline import Pipeline


@declare
class Options(ModelOptions):
    """page"""

    port: int = option("where the page is served; 0: the first free one from 7860", 7860, least=0, most=65535)
    host: str = option("where it listens; 0.0.0.0: at every address", "127.0.0.1", unit="ADDRESS")


def run(options: Options) -> None:
    """Serve the page until it is interrupted. UserError without gradio, or for a port that is taken."""
    check_model(options)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    # Read when torch is imported. Visitors are served by other threads than the one that loaded the model;
    # OpenMP then lets two teams of threads on the same cores wait: an AR step takes three times as long, and
    # every race would flatter the method with fewer steps.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        import gradio
    except ImportError as error:
        raise UserError(
            f"demo needs gradio ({error}): `bash scripts/setup.sh requirements-demo.txt` installs it"
        ) from None
    from demo.page import serve

    pipe = pipeline(options)
    print(f"{options.model} is loaded; a short warm-up, so that no race pays for it", flush=True)
    try:
        page, address = serve(pipe, options.batch_size, options.host, options.port)
    except (OSError, ValueError, gradio.exceptions.Error) as error:
        raise UserError(f"--host {options.host} --port {options.port}: {error}") from None
    print(f"the page is at {address}; Ctrl-C ends it", flush=True)
    page.block_thread()


def pipeline(options: ModelOptions) -> Pipeline:
    """The model with its drafter; without one where none was asked for and its own cannot be had."""
    from cli.loading import load

    try:
        return load(options, need_drafter=True, more_prompts=True)
    except UserError as error:
        if options.drafter_path is not None:
            raise
        pipe = load(options, need_drafter=False, more_prompts=True)
        print(f"{error}; the methods that need it are not offered", flush=True)
        return pipe
