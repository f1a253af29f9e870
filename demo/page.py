"""The page itself, in gradio: its fields, its buttons and what they are wired to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from adt_tree.errors import UserError
from adt_tree.method import METHODS
from adt_tree.pipeline import Pipeline
from demo import work
from demo.wishes import methods_of, prompt_of, prompts_of, seed_of
from demo.work import Cancelled, Job, News

EXAMPLES = Path(__file__).resolve().parent.parent / "configs" / "emoji_prompts.txt"
MOST_EXAMPLES, MOST_WAITING = 5, 32
STYLE = """
.gradio-container { max-width: 1100px !important; margin: 0 auto !important }
.bad { color: #b91c1c; font-weight: 600 } .dark .bad { color: #fca5a5 }
iframe { color-scheme: light } .dark iframe { color-scheme: dark }
"""
INTRODUCTION = """# One image, two ways to decode it
The model paints a picture as a grid of codes, and each code takes a pass of the whole model. A **draft tree**
guesses several codes ahead; one pass then checks them all and keeps the path it agrees with. The picture
stays the same, pixel for pixel. It is just finished sooner."""


def theme() -> gr.themes.Base:
    """Gradio's own in the race's blue, contrasts of 4.5 and more, and fonts that need not be fetched."""
    plain = gr.themes.Default(
        primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    return plain.set(
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
    )


def told(text: str, bad: bool = False) -> str:
    """A line of the page; errors are marked and read out."""
    return f'<p role="{"alert" if bad else "status"}" class="{"bad" if bad else ""}">{escape(text)}</p>'


class Desk:
    """What the buttons do. One job per visitor; the flag of a job is all that Cancel touches."""

    def __init__(self, pipe: Pipeline, batch_size: int) -> None:
        self.pipe, self.batch_size = pipe, batch_size
        self._jobs: dict[str, Job] = {}

    @property
    def methods(self) -> list[str]:
        """The exact methods that the loaded model can decode with: the page compares equal images."""
        return [name for name in self.pipe.methods if METHODS[name].exact]

    def race(
        self,
        prompt: str,
        left: str,
        right: str,
        seed: str,
        temperature: float,
        guidance: float,
        lantern: bool,
        request: gr.Request,
    ) -> Iterator[News]:
        """Lines of progress, at last the race."""

        def started(job: Job) -> Iterator[News]:
            methods = methods_of(self.pipe, (left, right), temperature, guidance, lantern)
            return work.race(self.pipe, job, prompt_of(prompt), seed_of(seed), methods)

        yield from self._answer(request, started)

    def sheet(
        self,
        prompts: str,
        method: str,
        seed: str,
        temperature: float,
        guidance: float,
        lantern: bool,
        request: gr.Request,
    ) -> Iterator[News]:
        """Lines of progress and pictures as they finish."""

        def started(job: Job) -> Iterator[News]:
            (own,) = methods_of(self.pipe, (method,), temperature, guidance, lantern)
            return work.sheet(self.pipe, job, prompts_of(prompts), seed_of(seed), own, self.batch_size)

        yield from self._answer(request, started)

    def _answer(self, request: gr.Request, started: Callable[[Job], Iterator[News]]) -> Iterator[News]:
        """What the visitor sees of a job, from an empty stage on; whatever is wrong is a line of the page."""
        visitor, stage = str(request.session_hash), None
        job = self._jobs[visitor] = Job()
        yield told("decoding"), stage
        try:
            for line, shown in started(job):
                stage = shown or stage
                yield told(line), shown or gr.skip()
        except UserError as error:
            yield told(str(error), bad=True), None
        except Cancelled:
            yield told(f"Cancelled at {job.progress}."), stage
        finally:
            self._jobs.pop(visitor, None)

    def cancel(self, request: gr.Request) -> str:
        """Raise the flag of the visitor's job; its next step is its last."""
        job = self._jobs.get(str(request.session_hash))
        if job is None:
            return told("Nothing of yours is being decoded; what waited in the queue is cancelled.")
        job.cancelled.set()
        return told(f"Cancelled at {job.progress}.")


def serve(pipe: Pipeline, batch_size: int, host: str, port: int) -> tuple[gr.Blocks, str]:
    """The page over a loaded model, warmed up and served by threads of its own, and its address.

    port 0: the first free one from 7860. OSError, ValueError or gradio's Error for a host or a port that it
    cannot have.
    """
    desk = Desk(pipe, batch_size)
    work.warm_up(pipe, ["ar", pipe.default_method])
    with gr.Blocks(title="ADT-Tree: a race", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Tab("Race"):
            race_tab(desk)
        with gr.Tab("Contact sheet"):
            sheet_tab(desk)
    page.queue(max_size=MOST_WAITING)
    _, address, _ = page.launch(
        server_name=host, server_port=port or None, share=False, prevent_thread_lock=True, quiet=True,
        show_error=True, ssr_mode=False, footer_links=[], theme=theme(), css=STYLE,
    )  # fmt: skip
    return page, address


def race_tab(desk: Desk) -> None:
    """Prompt, two methods, settings, and the frame of the race."""
    prompt = gr.Textbox(examples()[0], label="Prompt", max_lines=3)
    gr.Examples(examples(), prompt, label="Prompts to try", cache_examples=False)
    with gr.Row():
        left = gr.Dropdown(desk.methods, value="ar", label="Left", min_width=120)
        right = gr.Dropdown(desk.methods, value=desk.pipe.default_method, label="Right", min_width=120)
    settings = sampling_fields()
    start, end = buttons("Race")
    news, stage = gr.HTML(min_height=40), gr.HTML(padding=False)
    triggers, inputs = [start.click, prompt.submit], [prompt, left, right, *settings]
    wire(desk, "race", triggers, end, desk.race, inputs, [news, stage])


def sheet_tab(desk: Desk) -> None:
    """A list of prompts, one method, and their pictures."""
    prompts = gr.Textbox("\n".join(examples()), label="Prompts, one a line", lines=4, max_lines=16)
    method = gr.Dropdown(desk.methods, value=desk.pipe.default_method, label="Method")
    settings = sampling_fields()
    start, end = buttons("Draw")
    news = gr.HTML(min_height=40)
    pictures = gr.Gallery(
        label="Pictures, tau under each", columns=4, height="auto", object_fit="contain", format="png"
    )
    wire(desk, "sheet", [start.click], end, desk.sheet, [prompts, method, *settings], [news, pictures])


def sampling_fields() -> list[Any]:
    """Seed, temperature, guidance, LANTERN; checked by demo.wishes, so that every fault reads alike."""
    with gr.Row():
        seed = gr.Textbox("7", label="Seed", min_width=100)
        temperature = gr.Number(1.0, label="Temperature", step=0.1, min_width=100)
        guidance = gr.Number(3.0, label="Guidance", step=0.5, min_width=100)
    lantern = gr.Checkbox(False, label="LANTERN", info="Faster, but another image")
    return [seed, temperature, guidance, lantern]


def buttons(name: str) -> tuple[gr.Button, gr.Button]:
    """One that decodes and one that ends it."""
    with gr.Row():
        return gr.Button(name, variant="primary", min_width=100), gr.Button("Cancel", min_width=100)


def wire(
    desk: Desk,
    name: str,
    triggers: list[Any],
    end: gr.Button,
    decode: Callable[..., Any],
    inputs: list[Any],
    outputs: list[Any],
) -> None:
    """Decode for one visitor at a time; Cancel ends the visitor's own job, or takes it out of the queue."""
    decoding = gr.on(
        triggers, decode, inputs, outputs, api_name=name, concurrency_id="model", concurrency_limit=1,
        show_progress="minimal",
    )  # fmt: skip
    end.click(desk.cancel, None, outputs[:1], queue=False, cancels=[decoding], api_name=f"cancel_{name}")


def examples() -> list[str]:
    """The prompts that the page offers."""
    return EXAMPLES.read_text(encoding="utf-8").splitlines()[:MOST_EXAMPLES]
