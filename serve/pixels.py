"""The threads beside the decoding one: one encodes prompts, the other turns codes into picture files."""

from __future__ import annotations

import asyncio
import base64
import io
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image

from adt_tree.pipeline import Pipeline
from eval.runs.run_folder import png_bytes
from models.target import EncodedPrompt

MISSING = (128, 128, 128)  # colour of the cells that have no code yet


class Painter:
    """Encodes prompts in one thread and makes pictures in another. As each is a single thread, the pictures
    of an image are made in the order of the calls."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        # The rounding of the codec's convolutions depends on OpenMP's number of threads, which each thread
        # that calls OpenMP has to itself. Both threads start with the number of this one, so that pictures
        # are the same as those of generate_images.
        start = (torch.set_num_threads, (torch.get_num_threads(),))
        self._texts = ThreadPoolExecutor(1, "texts", *start)
        self._pixels = ThreadPoolExecutor(1, "pixels", *start)

    async def encode(self, text: str) -> EncodedPrompt:
        """Returns a prompt's tokens. Raises UserError for a prompt that the model cannot encode."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, self._encode, text)

    def _encode(self, text: str) -> EncodedPrompt:
        with torch.inference_mode():
            return self._pipe.model.encode(text)

    async def paint(self, codes: list[int], kind: str, compression: int) -> str:
        """Returns the picture of codes as a file in base64. Where codes are missing it is grey.

        kind: png, webp or jpeg; compression: the quality of the last two, 0 to 100.
        """
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._pixels, self._paint, codes, kind, compression)

    def _paint(self, codes: list[int], kind: str, compression: int) -> str:
        if len(codes) == self._pipe.model.grid.size:
            picture = self._pipe.image(codes)
        else:
            part = self._pipe.partial_image(codes)
            picture = Image.new("RGB", part.size, MISSING)
            picture.paste(part, mask=part)
        return base64.b64encode(file_bytes(picture, kind, compression)).decode()

    def close(self) -> None:
        """Ends the threads once their current calls have ended."""
        self._texts.shutdown(cancel_futures=True)
        self._pixels.shutdown(cancel_futures=True)


def file_bytes(picture: Image.Image, kind: str, compression: int) -> bytes:
    """Returns a picture as a file: a PNG as generate_images writes it, or a WebP or JPEG of a quality."""
    if kind == "png":
        return png_bytes(picture)
    stream = io.BytesIO()
    picture.save(stream, format=kind.upper(), quality=compression)
    return stream.getvalue()
