"""The work beside the decoding thread: encoding prompts, and turning codes into picture files."""

from __future__ import annotations

import asyncio
import base64
import io
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image

from adt_tree.pipeline import Pipeline
from models.target import EncodedPrompt
from serve.openmp import in_new_thread

MISSING = (128, 128, 128)  # colour of the cells that have no code yet


class Painter:
    """Encodes prompts one after the other, and beside them makes pictures one after the other, so that the
    pictures of an image are made in the order of the calls. On CUDA both have a stream of their own, so that
    no decoding step waits for them."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self._threads, device = pipe, torch.get_num_threads(), pipe.model.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._texts, self._pixels = ThreadPoolExecutor(1, "texts"), ThreadPoolExecutor(1, "pixels")

    async def encode(self, text: str) -> EncodedPrompt:
        """Returns a prompt's tokens. Raises UserError for a prompt that the model cannot encode."""
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._texts, in_new_thread, self._threads, self._encode, text)

    def _encode(self, text: str) -> EncodedPrompt:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            prompt = self._pipe.model.encode(text)
        if self._stream is not None:
            self._stream.synchronize()  # the decoding stream reads the prompt
        return prompt

    async def paint(self, codes: list[int], kind: str, compression: int) -> str:
        """Returns the picture of codes as a file in base64, a PNG as generate_images writes it. Where codes
        are missing it is grey.

        kind: png, webp or jpeg; compression: the quality of the last two, 0 to 100.
        """
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._pixels, in_new_thread, self._threads, self.picture, codes, kind, compression)

    def picture(self, codes: list[int], kind: str, compression: int) -> str:
        """Does what paint() says, in the calling thread."""
        with torch.cuda.stream(self._stream):
            if len(codes) == self._pipe.model.grid.size:
                picture = self._pipe.image(codes)
            else:
                part = self._pipe.partial_image(codes)
                picture = Image.new("RGB", part.size, MISSING)
                picture.paste(part, mask=part)
        stream = io.BytesIO()
        picture.save(stream, format=kind.upper(), quality=compression)  # which PNG does not read
        return base64.b64encode(stream.getvalue()).decode()

    def close(self) -> None:
        """Ends the threads once their current calls have ended."""
        self._texts.shutdown(cancel_futures=True)
        self._pixels.shutdown(cancel_futures=True)
