"""Several rows at once: the schedule, what the nodes of a pass see, and the images. These are those of a
plain loop without a cache, and the AR baseline's where a row begins when the row above is finished."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from adt_tree.engine import Engine, build
from adt_tree.errors import UserError
from adt_tree.grid import Grid, Raster
from adt_tree.method import Method
from adt_tree.noise import Noise
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.roles import Request
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from lab.rows.engine import rows_engine
from lab.rows.nodes import PassNodes, Plan, numbers_of
from lab.rows.schedule import Head, Schedule
from lab.settings import Control, Rows
from models.model import Model
from tests.adt_tree.test_engine import CODEBOOK, CODES, FIRST, GRID, IMAGES, decoder, net, reference
from tests.adt_tree.test_row_ends import lined_model
from tests.conftest import Command, Refused, Result
from tests.support.checkpoints import Checkpoints
from tests.support.decoding import chain, codes_of, model_of
from tests.support.refusal import refusal
from tests.support.tape import Machine

MAX_PROMPT = 8
WINDOW, TREE = TreeShape(3, 1, 3), TreeShape(3, 3, 6)
BOTH = (False, True)
LAYOUTS = [Rows(start, newest, catches_up=lag) for start, newest, lag in product((1, 2, 3, 5), BOTH, BOTH)]


def random_model(grid: Grid) -> Model:
    """Returns the random networks of the engine's tests for another grid."""
    return model_of(decoder(), net(), grid, FIRST, CODEBOOK)


def engine_of(method: Method, slots: int = 2, grid: Grid = GRID) -> Engine:
    """Returns the engine of a method over them."""
    return build(random_model(grid), method, slots, MAX_PROMPT)


def in_raster_order(method: Method, grid: Grid) -> Engine:
    """Returns an engine that decodes in raster order by the loop of several rows, which build() would not
    choose for that."""
    model = lined_model(grid) if grid.row_ends else random_model(grid)
    schedule = Schedule.of(Rows(grid.image.stride), model.grid)
    return rows_engine(model, method, 2, MAX_PROMPT, schedule)


@pytest.mark.parametrize(
    "rows", [*LAYOUTS, Rows(2, plain_first=True), Rows(3, plain_first=True, catches_up=True)], ids=str
)
@pytest.mark.parametrize("row_ends", [False, True])
def test_every_row_in_progress_can_commit_a_cell_in_every_pass(rows: Rows, row_ends: bool) -> None:
    """Rows that commit as many cells as they may, or fewer at random: the rows of a pass have heads of their
    own, no row passes its lag, every cell is committed once, and each is read before its row goes on."""
    schedule = Schedule.of(rows, Grid(6, 5, row_ends=row_ends))
    for seed in range(20):
        generator, progress, most, read = random.Random(seed), schedule.begin(1), 0, set[int]()
        while schedule.image(progress) is None:
            before = progress.committed.copy()
            heads = [head for head in schedule.next_heads(progress) if head]
            open_ = [head for head in heads if head.room]
            began = [row for row, count in enumerate(before) if 0 < count < schedule.length(row)]
            rows_of = [(head.position + 1) // schedule.raster.stride for head in open_]
            assert set(began) <= set(rows_of) and len(set(rows_of)) == len(rows_of)
            read |= {head.position for head in heads if head.known}
            counts = [head.room if seed % 2 else generator.randint(1, head.room) for head in open_]
            most = max(most, len(heads))
            schedule.advance(progress, open_, [[1] * count for count in counts])
            for head, count in zip(open_, counts, strict=True):
                read |= {head.position + n for n in range(1, count)}
            for row in range(1, 6):
                above, now = before[row - 1], progress.committed[row]
                assert (
                    now <= before[row] or above == schedule.length(row - 1) or now <= above - schedule.lag + 1
                )
                assert before[row] or not now or above >= schedule.start
        last = schedule.raster.length - 1
        assert progress.codes == [1] * (last + 1) and read >= set(range(last))
        assert most <= schedule.heads
        assert not row_ends or len(schedule.image(progress)) == 30


PASSES = [
    (grid, start, plain)
    for grid, start, plain in product((Grid(5, 7), Grid(1, 6), Grid(6, 2)), (1, 2, 6), BOTH)
    if start < grid.width
]


@pytest.mark.parametrize(("grid", "start", "plain"), PASSES, ids=str)
def test_passes_of_zipar(grid: Grid, start: int, plain: bool) -> None:
    """The prompt gives the first code. A row that overlaps is `start` passes behind the row above, and has
    its last code `width` passes after its beginning."""
    method = Method("zipar", Sampling(), relaxed=Rows(start, plain_first=plain))
    (image,) = engine_of(method, 1, grid).decode(IMAGES[:1])
    width, rows = grid.width, grid.height
    expected = width + (rows - 1) * start - 1
    if plain and rows > 1:
        expected = 2 * width + (rows - 2) * start - 1
    assert image.target_calls == len(image.steps) == expected
    assert sum(step.accepted + 1 for step in image.steps) == grid.size - 1
    assert all(len(step.top1) == step.accepted + 1 and not step.nodes for step in image.steps)


def plain_zipar(request: Request, rows: Rows, sampling: Sampling, grid: Grid) -> list[int]:
    """Returns the codes of ZipAR by a loop that computes everything anew in every pass. A cell sees the cells
    before it that were committed when it was read, one pass after it was committed."""
    target = random_model(grid).target(1, sampling, grid.length + grid.height, MAX_PROMPT)
    noise, seeds, width = Noise(CODES, silent=sampling.greedy), torch.tensor([request.seed]), grid.width
    count, codes, sees = [0] * grid.height, dict[int, int](), dict[int, set[int]]()

    def commit(logits: torch.Tensor, place: int) -> None:
        log_p = log_probs(logits[:, None], PassSampling.uniform(sampling, logits.device))
        codes[place] = int((log_p + noise.gumbel(seeds, torch.tensor([[place]]))[0]).argmax())
        count[place // width] += 1

    commit(target.prefill({0: request.prompt})[0].logits, 0)
    while len(codes) < grid.length:
        fresh = sorted(set(codes) - set(sees))
        sees |= {cell: {other for other in codes if other <= cell} for cell in fresh}
        nodes = [(cell, codes[cell], sees[cell]) for cell in sorted(sees)]
        next_of = {
            cell + 1: n for n, (cell, *_) in enumerate(nodes) if cell in fresh and cell + 1 not in codes
        }
        next_of = {
            place: n for place, n in next_of.items() if place % width or count[place // width - 1] == width
        }
        for row in range(1, grid.height):
            above = count[row - 1]
            if count[row] or above == width or above < rows.row_start or (row == 1 and rows.plain_first):
                continue
            source = (row - 1) * width + above - 1
            if not rows.newest:
                whole = [r for r in range(row) if count[r] == width]
                source = whole[-1] * width + width - 1 if whole else (row - 1) * width
            place = row * width
            next_of[place] = len(nodes)
            nodes.append((place - 1, codes[source], {cell for cell in codes if cell < place - 1}))
        ancestors = torch.tensor(
            [[m == n or (m < len(sees) and cell in seen) for m, (cell, *_) in enumerate(nodes)]
             for n, (*_, seen) in enumerate(nodes)]
        )  # fmt: skip
        tokens = torch.tensor([[code + FIRST for _, code, _ in nodes]])
        depths = torch.tensor([[place for place, *_ in nodes]])
        features = target.features(tokens, depths, ancestors[None], [request.prompt.length])
        logits = target.logits(features)[:, 0]
        for place, node in next_of.items():
            commit(logits[:, node], place)
    return [codes[place] for place in range(grid.length)]


ZIPAR = [(GRID, Rows(start, newest)) for start, newest in product((1, 2, 3), BOTH)]
ZIPAR += [(Grid(5, 6), Rows(2)), (Grid(5, 6), Rows(4, plain_first=True)), (Grid(6, 2), Rows(1))]


@pytest.mark.parametrize(("grid", "rows"), ZIPAR, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, guidance=1.0)], ids=["sampled", "greedy"])
def test_zipar_is_the_plain_loop(grid: Grid, rows: Rows, sampling: Sampling) -> None:
    images = codes_of(engine_of(Method("zipar", sampling, relaxed=rows), 2, grid).decode(IMAGES))
    with torch.inference_mode():
        assert images == {request.name: plain_zipar(request, rows, sampling, grid) for request in IMAGES}


@pytest.mark.parametrize("name", ["zipar", "self-draft"])
@pytest.mark.parametrize("grid", [GRID, Grid(2, 6), Grid(3, 4, row_ends=True)], ids=str)
def test_one_row_after_the_other_is_the_ar_baseline(name: str, grid: Grid) -> None:
    """The loop of several rows with one row: drafts stop at the end of a row, codes are the AR baseline's."""
    for shape in (None,) if name == "zipar" else (WINDOW, TREE):
        method = Method(name, Sampling(), shape)
        baseline = Method("ar", Sampling())
        model = lined_model(grid) if grid.row_ends else random_model(grid)
        images = [*in_raster_order(method, grid).decode(IMAGES)]
        assert codes_of(images) == codes_of(build(model, baseline, 2, MAX_PROMPT).decode(IMAGES))
        calls = sum(image.target_calls for image in images)
        assert (
            calls == len(IMAGES) * (grid.length - 1)
            if shape is None
            else calls < len(IMAGES) * (grid.length - 1)
        )


SAME = [("zipar", "ar", None), ("pjd", "sjd", WINDOW), ("self-draft", "self-draft", TREE)]


@pytest.mark.parametrize(("name", "without", "tree"), SAME)
def test_with_a_whole_row_a_method_is_what_it_is_without_the_option(
    name: str, without: str, tree: TreeShape | None
) -> None:
    for sampling in (Sampling(), Sampling(0.0)):
        images = codes_of(engine_of(Method(name, sampling, tree, relaxed=Rows(4))).decode(IMAGES))
        assert images == codes_of(engine_of(Method(without, sampling, tree)).decode(IMAGES))
    assert images == reference(Sampling(0.0))


FEW = [Rows(1), Rows(2, newest=True), Rows(3, plain_first=True, catches_up=True)]


@pytest.mark.parametrize("rows", FEW, ids=str)
@pytest.mark.parametrize(("name", "tree"), [("zipar", None), ("pjd", WINDOW), ("self-draft", TREE)], ids=str)
def test_an_image_is_the_same_in_any_company(name: str, tree: TreeShape | None, rows: Rows) -> None:
    method = Method(name, Sampling(), tree, relaxed=rows)
    alone = [*engine_of(method, 1, Grid(5, 4)).decode(IMAGES)]
    assert codes_of(engine_of(method, 3, Grid(5, 4)).decode(IMAGES)) == codes_of(alone)
    calls = [image.target_calls for image in alone]
    assert all(
        len(image.codes) == 20 and image.tau == pytest.approx(19 / len(image.steps)) for image in alone
    )
    assert max(calls) < 19 or rows.row_start == 3
    assert codes_of(alone) != codes_of(engine_of(Method("ar", Sampling()), 3, Grid(5, 4)).decode(IMAGES))


@pytest.mark.parametrize(("name", "tree"), [("zipar", None), ("pjd", WINDOW), ("self-draft", TREE)], ids=str)
def test_recorded_passes_give_the_same_images(
    name: str, tree: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes have one number of nodes, so that one recording serves them all."""
    recorder = Machine()
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: recorder)
    method, model = Method(name, Sampling(), tree, relaxed=Rows(2)), random_model(Grid(5, 4))
    recorded = build(replace(model, graphs=True), method, 3, MAX_PROMPT)
    expected = codes_of(engine_of(method, 3, Grid(5, 4)).decode(IMAGES))
    assert codes_of(recorded.decode(IMAGES)) == expected == codes_of(recorded.decode(IMAGES))
    assert 1 <= recorded.target.run.captured <= 8


@pytest.mark.parametrize("name", ["llamagen", "emu3"])
def test_families(name: str, checkpoints: Checkpoints) -> None:
    """Rows of a model with row ends have one cell more, except for the last one."""
    pipe = Pipeline(checkpoints[name].load(need_drafter=False))
    grid, requests = pipe.model.grid, pipe.requests(["sun", "red moon"], 5)
    for method, tree in (("zipar", None), ("self-draft", TREE)):
        chosen = replace(pipe.method(method, tree=tree), relaxed=Rows(2))
        images = [*pipe.engine(chosen, requests, 2).decode(requests)]
        assert all(len(image.codes) == grid.size for image in images)
        assert tree or images[0].target_calls == 2 * (grid.height - 1) + grid.width - 1


def test_what_three_active_rows_see() -> None:
    """PJD: "a draft sees all committed codes of the rows above, and its own row's drafts, not the drafts of
    other rows". Rows of 5 cells have 4, 2 and no committed cells, of which the newest are not in the cache;
    the third row begins with a stand-in before its first cell. The heads have two, one and two drafts."""
    heads = [Head(3, 3, True, 2), Head(6, 6, True, 2), Head(9, 4, False, 2)]
    plan = Plan.of(numbers_of([heads], [[3, 2, 3]], torch.device("cpu")))
    tree = chain(torch.zeros(3, 4, dtype=torch.int64))
    cells = torch.zeros(1, 15, dtype=torch.bool)
    cells[0, [0, 1, 2, 5]] = True
    nodes = PassNodes.of(plan, tree, cells, 9)
    committed = [0, 1, 2, 3, 5, 6]  # 3 and 6 are the roots of the first two rows
    places = [(0, 3), (0, 4), (0, 5), (1, 6), (1, 7), (2, 9), (2, 10), (2, 11)]
    assert nodes.positions[0, :8].tolist() == [position for _, position in places]
    for node, (row, position) in enumerate(places):
        root = heads[row].position
        seen = {("cell", cell) for cell in committed if cell <= root and cell not in (3, 6)}
        for other, (its_row, its_position) in enumerate(places):
            is_root = its_position == heads[its_row].position
            if is_root and its_row < 2:
                visible = its_position <= root
            elif is_root:
                visible = other == node  # the stand-in
            else:
                visible = its_row == row and its_position <= position
            if visible:
                seen.add(("node", other))
        mask = nodes.visible[0, node].tolist()
        assert {("cell", n) for n in range(15) if mask[n]} | {
            ("node", n) for n in range(9) if mask[15 + n]
        } == seen
    assert not nodes.visible[0, :8, 15 + 8].any() and nodes.visible[0, 8, 15 + 8]  # padding


REFUSED = [
    (lambda: Schedule.of(Rows(5), GRID), "row_start 5: a row has 4 cells"),
    (lambda: Schedule.of(Rows(2), Grid(4, 6, before=(Raster(2, 3),))), "row_start: .*raster"),
    (lambda: Rows(0), "row_start 0"),
    (lambda: Method("eagle-2", Sampling(), TREE, relaxed=Rows(2)), "row_start=2.*method eagle-2"),
    (lambda: Method("sjd", Sampling(), WINDOW, relaxed=Rows(2)), "row_start=2.*method sjd"),
    (lambda: Control("floor"), "control 'floor': choose one of accept-none, accept-all"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_refused(make: Callable[[], object], words: str) -> None:
    assert re.search(words, refusal(make))


@pytest.mark.parametrize("name", ["zipar", "pjd", "self-draft"])
def test_the_python_api_makes_images_but_streams_none(pipe: Pipeline, name: str) -> None:
    """The images are those of the engine, in any batch."""
    method = replace(pipe.method(name, tree=TREE if name == "self-draft" else None), relaxed=Rows(2))
    assert not method.exact and not replace(method, sampling=Sampling(0.0)).exact
    with pytest.raises(UserError, match=r"several rows at once; stream\(\)"):
        next(pipe.stream("sun", method))
    texts = ["sun", "red moon"]
    out, requests = pipe(texts, method, seed=3, batch_size=2), pipe.requests(texts, 3)
    assert len(out.images) == 2 and out.codes == pipe(texts, method, seed=3).codes
    alone = {image.name: image.codes for image in pipe.engine(method, requests).decode(requests)}
    assert out.codes == [alone[request.name] for request in requests]
    assert (name in pipe.methods) is (name == "self-draft")


def test_generate_images(command: Command, result: Result, refused: Refused) -> None:
    made = result(*command("a", "--method", "zipar", "--row_start", "2"))
    assert made["target_calls"] == 2 * 4 + 2 * 2 - 1
    words = ("b", "--method", "self-draft", "--total_token", "4", "--row_start")
    assert result(*command(*words, "2"))["skipped"] == 0 and result(*command(*words, "2"))["skipped"] == 5
    assert "relaxed" in refused(*command(*words, "1"))


def test_bench(checkpoints: Checkpoints, result: Result, tmp_path: Path) -> None:
    """A curve over the cells with which a row begins ends where the method is in raster order."""
    words = (
        "--methods ar zipar pjd self-draft --vary row_start=2,4 --temperatures 1 --num_images 3 --warmup 0"
    )
    folder = ["--output_dir", str(tmp_path / "o"), "--total_token", "4"]
    rows = result("bench", *checkpoints["emoji"].words(), *words.split(), *folder)["rows"]
    values = {(row["method"], *row["varied"].values()): row for row in rows}
    assert set(values) == {("ar",), *product(("ar-rows", "zipar", "pjd", "self-draft-rows"), (2, 4))}
    assert not any(row["exact"] for name, row in values.items() if name != ("ar",))
    assert [values[name, 4]["same_image"] for name in ("ar-rows", "zipar", "self-draft-rows")] == [1, 1, 1]
    assert values["ar-rows", 2]["target_calls"] == 4 + 3 * 2 - 1
    assert (
        values["zipar", 2]["target_calls"] == 2 * 4 + 2 * 2 - 1 and values["zipar", 4]["target_calls"] == 15
    )
    assert values["zipar", 2]["same_image"] == 0


CLI = ["--method pjd --heatmaps 2", "--method pjd --record 2", "--row_start 2 --total_token auto"]


@pytest.mark.parametrize("words", CLI)
def test_commands_refuse(command: Command, refused: Refused, words: str) -> None:
    assert words.split(" --")[-1] in refused(*command("o"), *words.split())
