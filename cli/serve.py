"""serve: generates images over HTTP in the form of OpenAI's images API, also as streams of partial images.

Several images are decoded at once, and a slot that falls free takes the next one between two steps. A client
gets the image that `Pipeline` makes of its prompt and seed, whatever else is in flight. After SIGTERM or
Ctrl-C the server finishes the requests that it has accepted, and ends. It also has a page to try it. Of
GLM-Image it serves the codes instead, as SGLang's diffusion server asks for them (--srt-encoder-url).
"""

from __future__ import annotations

import os
from pathlib import Path

from adt_tree.errors import UserError
from cli.options import GraphOptions, ModelOptions, check_pixels
from models.checkpoint.files import read_text, reading
from serve.settings import CODES_MODEL, DEFAULTS, KEY_VARIABLE, checked_key, is_loopback
from storage.command_line import CommandOptions, declare, option


@declare("service", {"slots": "batch_size"})
class Options(ModelOptions, GraphOptions, CommandOptions):
    """The model, and how it is served."""

    batch_size: int = DEFAULTS.slots
    host: str = option(
        "address to listen at; one that other machines can reach (0.0.0.0: all addresses) needs a key",
        "127.0.0.1",
        unit="ADDRESS",
    )
    port: int = option("port to listen at; 0: any free one", 8000, least=0, most=65535)
    server_name: tuple[str, ...] = option(
        "names by which clients may call the server, beside localhost and addresses; other names are refused",
        (),
        unit="NAME",
    )
    api_key_file: str | None = option(
        "file with the key that /v1 and /metrics require (default: the environment variable "
        f"{KEY_VARIABLE}; without both no key is required, and requests that a proxy forwards are refused: "
        "they have a header X-Forwarded-For, X-Real-IP or Forwarded, which every proxy must set)",
        unit="FILE",
    )
    queue: int = option(
        "images that may wait for a slot; requests for more are answered by status 429",
        DEFAULTS.queue,
        unit="IMAGES",
    )
    max_prompt_tokens: int = option(
        "number of tokens of the longest prompt; the caches have room for it",
        DEFAULTS.max_prompt_tokens,
        unit="TOKENS",
    )
    max_body: int = option("size of the largest request", DEFAULTS.max_body, unit="BYTES", least=256)
    timeout: float = option(
        "time for the body of a request to arrive, and between requests",
        DEFAULTS.timeout_s,
        unit="SECONDS",
        above=0,
    )
    grace: float = option(
        "time after a SIGTERM to finish the requests that were accepted; requests that take longer are "
        "answered with an error, and the exit status is 1",
        120.0,
        unit="SECONDS",
        least=0,
    )


def run(options: Options) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises UserError if a package is missing, or if the server cannot listen at the host and port.
    """
    if options.model != CODES_MODEL:
        check_pixels(options, "the server")
    key = read_key(options)
    if key is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host}: beyond this machine the server asks for a key; set {KEY_VARIABLE} or "
            "give --api_key_file"
        )
    try:
        import torch

        from serve import server
        from serve.app import create_app
        from serve.openmp import in_new_thread
        from serve.settings import Settings
    except ImportError as error:
        raise UserError(
            f"serve needs packages ({error}): `bash scripts/setup.sh requirements-serve.txt` installs them"
        ) from None
    from cli.model_from_options import load_with_drafter_if_any

    settings = Settings(
        slots=options.batch_size,
        queue=options.queue,
        max_prompt_tokens=options.max_prompt_tokens,
        max_body=options.max_body,
        timeout_s=options.timeout,
        api_key=key,
        server_names=(options.host, *options.server_name),
    )
    try:
        listener = server.bind(options.host, options.port)
    except OSError as error:
        raise UserError(f"--host {options.host} --port {options.port}: {error}") from None
    pipe = in_new_thread(torch.get_num_threads(), load_with_drafter_if_any, options)
    app, port = create_app(pipe, settings), listener.getsockname()[1]
    site = f"http://[{options.host}]:{port}" if ":" in options.host else f"http://{options.host}:{port}"
    where = "/generate" if pipe.model.codec.missing else f"/v1, and a page at {site}/"
    print(f"{options.model} is served at {site}{where}. Ctrl-C ends it.", flush=True)
    if key is None:
        print("There is no key, so requests of other machines and of proxies are refused.", flush=True)
    if not server.run(app, settings, listener, options.grace):
        raise SystemExit(1)


def read_key(options: Options) -> str | None:
    """Returns the key of the file or the environment, or None. Raises UserError if it is not one word."""
    if options.api_key_file is None:
        return checked_key(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
    with reading(Path(options.api_key_file), "give a file that holds the key"):
        key = read_text(Path(options.api_key_file))
    return checked_key(key, f"--api_key_file {options.api_key_file}")
