"""The page of `main.py demo`, in gradio: two methods decode one prompt, then the race is replayed.

gradio's own queue lets one visitor decode at a time, its fields refuse values out of range, and its Cancel
closes the generator `race`, which ends the decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import gradio as gr

from adt_tree.errors import UserError
from adt_tree.method import METHODS
from adt_tree.pipeline import Pipeline, StreamStep
from demo.race_page import race_frame
from demo.recording import recording_of

EXAMPLES = Path(__file__).resolve().parent.parent / "configs" / "emoji_prompts.txt"
MAX_CHARACTERS, MAX_WAITING = 300, 32  # of a prompt; visitors in the queue
MAX_SEED = 2**53 - 1  # the largest whole number that a browser sends exactly
PROGRESS_S = 0.3  # seconds between two lines of progress; Cancel takes effect at the next line
WARM_UP_STEPS = 3
STYLE = """
.gradio-container { max-width: 1100px !important; margin: 0 auto !important }
iframe { color-scheme: light } .dark iframe { color-scheme: dark }
"""
INTRODUCTION = """# One image, two ways to decode it
The model paints a picture as a grid of codes, and each code takes a pass of the whole model. A **draft tree**
guesses several codes ahead; one pass then checks them all and keeps the path it agrees with. The picture
stays the same, pixel for pixel. It is just finished sooner."""


def race(
    pipe: Pipeline,
    prompt: str,
    left: str,
    right: str,
    seed: int | None,
    temperature: float,
    guidance: float,
    lantern: bool,
) -> Iterator[tuple[str, str]]:
    """Decodes the prompt by both methods; yields lines of progress, and with the last one the race as HTML.

    Closing the generator ends the decoding. Raises gr.Error, which the page shows, for input that the model
    cannot decode. The seed is None if the visitor emptied its field.
    """
    prompt = " ".join(prompt.split())
    if not 0 < len(prompt) <= MAX_CHARACTERS:
        raise _refusal(f"The prompt has {len(prompt)} characters: give 1 to {MAX_CHARACTERS}.")
    if seed is None:
        raise _refusal("The seed is empty: give a whole number.")
    try:
        sampling = replace(pipe.sampling, temperature=temperature, guidance=guidance)
        recordings = []
        for name in (left, right):
            relaxed = pipe.model.spec.lantern if lantern and METHODS[name].lantern else None
            method = pipe.method(name, sampling=sampling, lantern=relaxed)
            steps, reported = list[StreamStep](), 0.0
            with closing(pipe.stream(prompt, method=method, seed=seed)) as stream:
                for step in stream:
                    steps.append(step)
                    if time.perf_counter() - reported > PROGRESS_S:
                        reported, count = time.perf_counter(), step.position + len(step.codes)
                        codes = f"{count} of {pipe.model.grid.size} codes"
                        yield f"{method.label}: {codes}, {len(steps)} target calls", ""
            yield f"{method.label}: painting the partial images", ""
            recordings.append(recording_of(pipe, method, prompt, seed, steps))
    except (UserError, FloatingPointError) as error:
        raise _refusal(f"{error}.") from None
    yield "Done.", race_frame(recordings)


def _refusal(text: str) -> gr.Error:
    """Returns an error that the visitor sees and that leaves no traceback in the server's log."""
    return gr.Error(text, print_exception=False)


def build(pipe: Pipeline) -> gr.Blocks:
    """Returns the page over a loaded model."""
    names = [name for name in pipe.methods if METHODS[name].exact]  # the page compares equal images
    examples = EXAMPLES.read_text(encoding="utf-8").splitlines()[:5]
    usual = pipe.sampling
    with gr.Blocks(title="ADT-Tree: a race", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        prompt = gr.Textbox(examples[0], label="Prompt", max_lines=3, max_length=MAX_CHARACTERS)
        gr.Examples(examples, prompt, label="Prompts to try", cache_examples=False)
        with gr.Row():
            left = gr.Dropdown(names, value="ar", label="Left", min_width=120)
            right = gr.Dropdown(names, value=pipe.default_method, label="Right", min_width=120)
        with gr.Row():
            seed = gr.Number(7, label="Seed", precision=0, minimum=0, maximum=MAX_SEED, min_width=100)
            temperature = gr.Slider(0, 2, usual.temperature, step=0.1, label="Temperature", min_width=180)
            guidance = gr.Slider(0, 10, usual.guidance, step=0.5, label="Guidance", min_width=180)
        lantern = gr.Checkbox(False, label="LANTERN", info="Faster, but another image")
        with gr.Row():
            start = gr.Button("Race", variant="primary", min_width=100)
            cancel = gr.Button("Cancel", min_width=100)
        progress, frame = gr.Markdown("Ready.", container=True), gr.HTML(padding=False)
        fields = [prompt, left, right, seed, temperature, guidance, lantern]
        decoding = gr.on(
            [start.click, prompt.submit], partial(race, pipe), fields, [progress, frame], api_name="race",
            concurrency_limit=1, show_progress="minimal",
        )  # fmt: skip
        cancel.click(lambda: "Cancelled.", None, progress, queue=False, cancels=[decoding], api_name="cancel")
    return page.queue(max_size=MAX_WAITING)


def serve(pipe: Pipeline, host: str, port: int) -> tuple[gr.Blocks, str]:
    """Serves the page from background threads; returns the page and its address.

    Port 0 stands for the first free one from 7860 on. Raises OSError, ValueError or gr.Error if the page
    cannot be served at the host and port.
    """
    for name in ("ar", pipe.default_method):  # A first call is slow; a race must not include it.
        with closing(pipe.stream("warm-up", method=name, seed=0)) as stream:
            for _ in zip(range(WARM_UP_STEPS), stream, strict=False):
                pass
    page = build(pipe)
    _, address, _ = page.launch(
        server_name=host, server_port=port or None, share=False, prevent_thread_lock=True, quiet=True,
        show_error=True, ssr_mode=False, footer_links=[], theme=theme(), css=STYLE,
    )  # fmt: skip
    return page, address


def theme() -> gr.themes.Base:
    """Returns gradio's theme with the race's blue and contrasts of at least 4.5.

    Its fonts are those of the system, because a web font would have to be fetched.
    """
    plain = gr.themes.Default(
        primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    return plain.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
    )
