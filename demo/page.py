"""The page itself, in gradio: its fields, its buttons and what they are wired to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from adt_tree.method import METHODS
from adt_tree.pipeline import Pipeline
from demo.wishes import Wish, methods_of, prompt_of, prompts_of, seed_of, strangers
from demo.work import Cancelled, Job, race, sheet, warm_up
from eval.errors import UserError
from eval.race import embedded

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FONTS = ["system-ui", "sans-serif"]
STYLE = """
.gradio-container { max-width: 1100px !important; margin: 0 auto !important }
.bad { color: #b91c1c; font-weight: 600 } .dark .bad { color: #fca5a5 }
"""
INTRODUCTION = """# One image, two ways to decode it
The model paints a picture as a grid of codes, and each code takes a pass of the whole model. A **draft tree**
guesses several codes ahead; one pass then checks them all and keeps the path it agrees with. The picture
stays the same, pixel for pixel. It is just finished sooner."""
Message = dict[str, Any] | str


def theme() -> gr.themes.Base:
    """Gradio's own, in the fonts that the visitor's machine has: none is fetched."""
    return gr.themes.Default(font=FONTS, font_mono=["ui-monospace", "monospace"])


def told(text: str, bad: bool = False) -> str:
    """A line of the page; errors are marked and read out."""
    return f'<p role="{"alert" if bad else "status"}" class="{"bad" if bad else ""}">{escape(text)}</p>'


class Desk:
    """What the buttons do. One job per visitor; the flag of a job is all that Cancel touches."""

    def __init__(self, pipe: Pipeline, batch_size: int) -> None:
        self.pipe, self.batch_size = pipe, batch_size
        self._jobs: dict[str, Job] = {}
        known = [path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("emoji_*.txt"))]
        words = " ".join(known).replace(",", " ").lower().split() if pipe.model.name == "emoji" else []
        self._known = frozenset(words)

    @property
    def methods(self) -> list[str]:
        """Names of the methods that the loaded model can decode with."""
        network = self.pipe.model.drafter_net is not None
        return [name for name, drafter in METHODS.items() if network or drafter in ("none", "self-draft")]

    @contextmanager
    def job(self, visitor: str) -> Iterator[Job]:
        """A visitor's job, which Cancel finds as long as it runs."""
        job = self._jobs[visitor] = Job()
        try:
            yield job
        finally:
            self._jobs.pop(visitor, None)

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
    ) -> Iterator[tuple[str, Message]]:
        """Lines of progress, at last the race; whatever is wrong is a line of the page."""
        try:
            methods = methods_of(self.pipe, (left, right), temperature, guidance, lantern)
            wish = Wish([prompt_of(prompt)], seed_of(seed), methods)
            yield told("decoding"), ""
            with self.job(str(request.session_hash)) as job:
                for news in race(self.pipe, wish, job):
                    if isinstance(news, str):
                        yield told(news), gr.skip()
                    else:
                        yield told(self.remark(wish.prompts)), embedded(news)
        except UserError as error:
            yield told(str(error), bad=True), ""
        except Cancelled:
            yield told(f"Cancelled at {job.progress}."), ""

    def sheet(
        self,
        prompts: str,
        method: str,
        seed: str,
        temperature: float,
        guidance: float,
        lantern: bool,
        request: gr.Request,
    ) -> Iterator[tuple[str, Any]]:
        """Pictures as they finish; whatever is wrong is a line of the page."""
        try:
            methods = methods_of(self.pipe, (method,), temperature, guidance, lantern)
            wish = Wish(prompts_of(prompts), seed_of(seed), methods)
            yield told("decoding"), []
            with self.job(str(request.session_hash)) as job:
                for tiles in sheet(self.pipe, wish, job, self.batch_size):
                    done = len(tiles) == len(wish.prompts)
                    yield told(self.remark(wish.prompts) if done else job.progress), tiles
        except UserError as error:
            yield told(str(error), bad=True), gr.skip()
        except Cancelled:
            yield told(f"Cancelled at {job.progress}."), gr.skip()

    def cancel(self, request: gr.Request) -> str:
        """Raise the flag of the visitor's job; its next step is its last."""
        job = self._jobs.get(str(request.session_hash))
        if job is None:
            return told("Nothing of yours is being decoded; what waited in the queue is cancelled.")
        job.cancelled.set()
        return told(f"Cancelled at {job.progress}.")

    def remark(self, prompts: list[str]) -> str:
        """What to say of finished pictures: words that the model has never seen."""
        new = [word for prompt in prompts for word in strangers(prompt, self._known)]
        if not new:
            return "Done."
        words = ", ".join(f"“{word[:30]}”" for word in new[:6])
        return f"Done. The embedded model knows emoji by name and may never have seen {words}: a guess."


def build(pipe: Pipeline, batch_size: int = 1) -> gr.Blocks:
    """The page over a loaded model, warmed up."""
    desk = Desk(pipe, batch_size)
    warm_up(pipe, ["ar", pipe.default_method])
    with gr.Blocks(title="ADT-Tree: a race", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Tab("Race"):
            race_tab(desk)
        with gr.Tab("Contact sheet"):
            sheet_tab(desk)
    return page


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
        lantern = gr.Checkbox(False, label="LANTERN", info="Faster, but another image", min_width=200)
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
    work: Callable[..., Any],
    inputs: list[Any],
    outputs: list[Any],
) -> None:
    """Decode for one visitor at a time; Cancel ends the visitor's own job, or takes it out of the queue."""
    decoding = gr.on(
        triggers, work, inputs, outputs, api_name=name, concurrency_id="model", concurrency_limit=1,
        show_progress="minimal",
    )  # fmt: skip
    end.click(desk.cancel, None, outputs[:1], queue=False, cancels=[decoding], api_name=f"cancel_{name}")


def examples() -> list[str]:
    """The prompts that the page offers: three the embedded model was trained on, two it never saw."""
    files = (("emoji_prompts.txt", 3), ("emoji_unseen.txt", 2))
    return [
        line
        for name, count in files
        for line in (CONFIGS / name).read_text(encoding="utf-8").splitlines()[:count]
    ]
