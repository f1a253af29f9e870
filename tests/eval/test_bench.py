"""bench: which combinations it measures, what a row holds, and that an interrupted run continues."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adt_tree.errors import UserError
from adt_tree.grid import Grid
from adt_tree.method import METHODS
from adt_tree.records import Decoded, Step
from cli.bench import Options, check, configurations, load
from eval.columns import COLUMNS
from eval.profile import PARTS, exclusive_time
from eval.random_model import middle_rows
from storage import process
from storage.measurements import Measured, Measurements
from tests.conftest import Refused, Result, Run
from tests.models.test_buckets import tiny
from tests.support.checkpoints import Checkpoints
from tests.support.tiny import tiny_dimensions

VARIED = "--vary seed_cells=random,left,above"
CLOCKS = {"SR_95", *(column.key for column in COLUMNS.values() if column.timed)}


def parsed(words: str) -> Options:
    """Returns the options of a command line."""
    return Options.parse(words.split(), "main.py bench")


def names(words: str) -> list[str]:
    """Returns the names of the configurations that a command line measures."""
    return [configuration.name for configuration in configurations(parsed(words))]


@pytest.fixture
def words(checkpoints: Checkpoints, tmp_path: Path) -> list[str]:
    """Returns the words of bench for the tiny checkpoint, with tmp_path / o as its output."""
    _, _, *fixed = checkpoints["emoji"].words()  # without --model
    return ["bench", *fixed, "--output_dir", str(tmp_path / "o")]


def rows_without_times(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a result without the values of CLOCKS."""
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in result["rows"]]


def test_every_method_has_its_flags() -> None:
    for configuration, method in configurations(parsed(f"--methods {' '.join(METHODS)}")).items():
        assert configuration.method == method.label == method.name and method.exact == configuration.exact


def test_every_combination_once() -> None:
    labels = names("--methods adt-tree eagle-1 --temperatures 0 1 --total_token 8 16 --batch_size 1 4")
    assert len(labels) == len(set(labels)) == 2 * 2 * (1 + 1 + 2)  # ar and eagle-1 have no dynamic tree
    assert labels[0].startswith("ar temperature=0.0 batch_size=1")
    labels = names("--methods eagle-2 adt-tree --temperatures 1 --vary adt_beta=0.3,0.5 --vary depth=2,3")
    assert [name.split(" ")[0] for name in labels] == ["ar", "eagle-2", "eagle-2", "adt-tree", "adt-tree"]
    assert labels[1].endswith("depth=2") and labels[3].endswith("adt_beta=0.3")
    methods = configurations(parsed("--methods adt-tree --temperatures 1 --vary adt_beta=0.3,0.5"))
    assert [method.tree.beta for method in methods.values() if method.drafting] == [0.3, 0.5]
    bounds = names("--methods eagle-2 eagle-2-lantern --controls accept-none accept-all --temperatures 1")
    expected = ["ar", "eagle-2", "eagle-2:accept-none", "eagle-2:accept-all", "eagle-2-lantern"]
    assert [name.split(" ")[0] for name in bounds] == expected


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ("eagle-2 adt-tree", "--adt_beta 0.3 --depth 3"),
        ("eagle-1 self-draft", "--total_token 20 --seed_cells left --verify rejection"),
        ("adt-tree", "--rules reference --verify rejection"),
        ("self-draft-lantern eagle-2-lantern", "--lantern_k 50 --lantern_delta 0.2 --seed_cells left"),
    ],
)
def test_an_option_that_one_method_reads_is_taken(methods: str, words: str) -> None:
    assert len(names(f"--methods {methods} {words} --temperatures 0 1")) == 2 * (1 + len(methods.split()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--methods eagle2", "eagle-2"),
        ("--vary adt_beta", "KEY=VALUE,VALUE"),
        ("--vary adt_beta=2", "from 0 to 1"),
        ("--vary adt_bta=0.5", "cannot be varied"),
        ("--reference transformers --model lumina_mgpt --methods self-draft", "--reference transformers"),
        ("--reference transformers --batch_size 8", "add 1 to --batch_size"),
        ("--random_weights", "--random_weights with --model emoji"),
        ("--methods ar --controls accept-all", "--controls accept-all"),
    ],
)
def test_impossible_combinations_are_one_line(words: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^[^\n]*{says}[^\n]*$"):
        options = parsed(words)
        check(options)
        configurations(options)


def test_a_value_that_a_method_cannot_take_is_left_out_for_it() -> None:
    _, *chosen = configurations(parsed(f"--methods self-draft sjd eagle-2 --temperatures 1 {VARIED}"))
    values = [(item.method, *dict(item.varied).values()) for item in chosen]
    assert values == [
        *[("self-draft", cells) for cells in ("left", "above")],
        *[("sjd", cells) for cells in ("random", "left", "above")],
        ("eagle-2",),
    ]
    with pytest.raises(UserError, match="--vary seed_cells=random: method self-draft"):
        names("--methods self-draft sjd --vary seed_cells=random")


UNREAD = [
    "--vary adt_beta=0.3,0.5 --methods eagle-2", "--lantern_k 50 --methods eagle-2 self-draft",
    "--rules reference --verify rejection --methods eagle-2 --temperatures 0",
]  # fmt: skip


@pytest.mark.parametrize("words", UNREAD)
def test_an_option_that_no_method_reads_is_refused(words: str) -> None:
    first = words.split("=")[0].split(" --")[0]
    with pytest.raises(UserError, match=rf"^{first}[^\n]*none of --methods ar"):
        names(words)


def test_bench(run: Run, words: list[str], tmp_path: Path) -> None:
    more = "--methods adt-tree eagle-2 --num_images 2 --reference transformers --profile"
    status, out, err = run(*words, *more.split())
    assert (status, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "o" / "bench.json").read_text())
    assert {"command", "environment", "options", "prompts", "rows"} <= set(result)
    needed = {"commit", "dirty", "date", "device", "torch", "threads", "precision"}
    assert needed <= set(result["environment"])
    rows = {(row["method"], row["temperature"]): row for row in result["rows"]}
    assert len(rows) == 2 * 4
    for entry in rows.values():
        assert entry["SR_95"][0] <= entry["SR"] <= entry["SR_95"][1] and entry["images"] == 2
        assert entry["same_image"] == 1 or not entry["exact"]
        assert entry["step_ms"] > 0 and entry["images_per_min"] > 0
    assert rows["ar", 1.0]["SR"] == 1 and rows["ar", 1.0]["target_calls"] == 15
    assert rows["adt-tree", 0.0]["mean_depth"] > 0 and rows["adt-tree", 0.0]["drafter_calls"] > 0
    assert len(result["profile"]) == 2 * 3 and result["weights_read"]["read_ms"] > 0
    for split in result["profile"]:
        assert set(split["shares"]) == {*PARTS, "host"}
        assert sum(split["shares"].values()) == pytest.approx(1, abs=1e-3)
        drafted = not split["configuration"].startswith("ar ")
        assert min(split["shares"].values()) >= 0 and (split["shares"]["drafter"] > 0) == drafted
        assert min(split["shares"][part] for part in ("target", "commit")) > 0


def test_batches_trees_and_bounds(result: Result, words: list[str]) -> None:
    more = "--methods eagle-2 --controls accept-none accept-all --temperatures 1 --warmup 0 --num_images 3"
    rows = result(*words, *more.split(), *"--total_token 4 8 --batch_size 1 2".split())["rows"]
    by_setting = {(row["method"], row["total_token"], row["batch_size"]): row for row in rows}
    assert len(by_setting) == len(rows) == 2 + 2 * 2 * 3
    for batch in (1, 2):
        assert by_setting["ar", None, batch]["SR"] == 1 and by_setting["eagle-2", 4, batch]["same_image"] == 1
        bounds = (":accept-none", "", ":accept-all")
        low, drafted, high = (by_setting[f"eagle-2{kind}", 8, batch]["tau"] for kind in bounds)
        assert low == 1 <= drafted < high and high > 3
    assert by_setting["eagle-2", 4, 1]["mean_nodes"] < 4 < by_setting["eagle-2", 8, 1]["mean_nodes"] < 8


def test_quality_and_the_knob_of_a_relaxed_rival(result: Result, words: list[str]) -> None:
    """A group of all codes accepts every draft, whatever its code: fewest calls, least likely images."""
    more = "--methods eagle-2 gsd --gsd_gap 1 --gsd_distance 1e9 --vary gsd_group=1,999 --temperatures 1"
    more += " --num_images 2 --warmup 0"
    ar, _, eagle, plain, grouped = result(*words, *more.split(), "--quality")["rows"]
    assert ar["nll"] == eagle["nll"] and eagle["same_image"] == 1
    assert plain["varied"] == {"gsd_group": 1} and grouped["varied"] == {"gsd_group": 999}
    assert grouped["nll"] > plain["nll"] + 1 and grouped["target_calls"] == 1 and not grouped["exact"]
    low, high = grouped["nll_95"]
    assert 0 < low <= grouped["nll"] <= high
    assert grouped["nll_over_ar"] == pytest.approx(grouped["nll"] - ar["nll"], abs=1e-3)


def test_rows_of_ar_have_no_part_in_the_floor(result: Result, words: list[str]) -> None:
    more = "--methods ar --row_start 2 --temperatures 1 --num_images 1 --warmup 0 --quality"
    calls = {row["method"]: row["target_calls"] for row in result(*words, *more.split())["rows"]}
    assert calls["ar, other seeds"] == calls["ar"] > calls["ar-rows"]


def test_random_weights_read_no_file(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is a tiny one in the layout of lumina_mgpt."""
    dims = tiny_dimensions()
    monkeypatch.setattr("models.footprint.published_dimensions", lambda name: dims)
    more = "--model lumina_mgpt --random_weights --methods eagle-2 self-draft --temperatures 1 --num_images 2"
    words = ("bench", "--precision", "fp32", "--output_dir", tmp_path)
    rows = result(*words, *more.split(), "--warmup", "0")["rows"]
    assert [row["method"] for row in rows] == ["ar", "eagle-2", "self-draft"]
    assert all(row["same_image"] == 1 and row["step_ms"] > 0 for row in rows)
    some = "--model lumina_mgpt --random_weights --layers 1 --codes 8 --num_images 2 --images_per_prompt 2"
    pipe, prompts = load(parsed(some), need_drafter=False)
    assert pipe.model.decoder.config.num_layers == len(pipe.model.decoder.blocks) == 1
    assert pipe.model.grid == Grid(2, 4, row_ends=True)
    assert [prompt.name for prompt in prompts] == ["0", "1", "0.1", "1.1"]
    with pytest.raises(UserError, match="layers 3"):
        load(parsed("--model lumina_mgpt --random_weights --layers 3"), need_drafter=False)


def test_random_weights_of_two_rasters(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-Image's two rasters, of 1280 codes together, count as one square."""
    dims = tiny("glm_image")
    monkeypatch.setattr("models.footprint.published_dimensions", lambda name: dims)
    words = "--model glm_image --random_weights --methods self-draft --total_token 4 --temperatures 1"
    more = ("--num_images", "1", "--warmup", "0", "--precision", "fp32", "--output_dir", tmp_path)
    document = result("bench", *words.split(), *more)
    assert document["environment"]["grid"] == [7, 35]
    assert [row["same_image"] for row in document["rows"]] == [1, 1]


def test_the_prompt_of_random_weights_holds_the_rows_above() -> None:
    """One of four rows lies above the middle two: four codes, and with row ends a separator."""
    assert middle_rows(tiny_dimensions(), 8) == (Grid(2, 4), 12 + 5)
    assert middle_rows(tiny_dimensions(tokens=16), 8) == (Grid(2, 4), 12 + 4)
    assert middle_rows(tiny_dimensions(), 256) == (Grid(4, 4), 12)


def test_an_interrupted_bench_goes_on(
    run: Run, result: Result, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words += "--methods eagle-2 --controls accept-none --temperatures 1 --num_images 3 --depth 2".split()
    whole = result(*words)
    (tmp_path / "o").rename(tmp_path / "whole")
    add = Measurements.add

    def stopping(store: Measurements, *arguments: Any) -> None:
        add(store, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Measurements, "add", stopping)
        status, out, err = run(*words)
    assert (status, out, err.count("\n")) == (130, "", 1) and "the same command" in err
    status, out, err = run(*words, "--profile")
    assert (status, err) == (0, "")
    resumed = json.loads(out.splitlines()[-1])
    assert rows_without_times(resumed) == rows_without_times(whole)
    files = sorted((tmp_path / "o" / "measurements").iterdir())
    files[1].write_bytes(files[1].read_bytes()[:40])
    status, out, err = run(*words)
    resumed = json.loads(out.splitlines()[-1])
    assert status == 0 and err == f"warning: {files[1]} is damaged and is measured anew\n"
    assert rows_without_times(resumed) == rows_without_times(whole)
    # Every batch begins with another method.
    order = [next(iter(json.loads(file.read_text())["measured"])).split()[0] for file in files]
    assert order == ["ar", "eagle-2", "eagle-2:accept-none"]
    monkeypatch.setattr("eval.harness.interleaved", None)  # nothing is measured again
    again = result(*words)
    assert again["rows"] == resumed["rows"]


def test_another_configuration_is_refused(
    result: Result, refused: Refused, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words += "--methods eagle-2 --temperatures 1 --num_images 1 --warmup 0".split()
    result(*words)
    (file,) = (tmp_path / "o" / "measurements").iterdir()
    before = file.read_bytes()
    for change in ("--cfg 2", "--methods eagle-1", "--prompt cat"):
        assert "--output_dir" in refused(*words, *change.split())

    def environment(device: str, real: Any = process.environment, **changes: str) -> dict[str, Any]:
        return real(device) | changes

    with monkeypatch.context() as patch:
        patch.setattr(process, "environment", partial(environment, code="0"))
        assert "holds a run with code = " in refused(*words)
        patch.setattr(process, "environment", partial(environment, commit="0"))  # of a README, for example
        patch.setattr("eval.harness.interleaved", None)
        assert result(*words)["environment"]["commit"] == "0"
    assert file.read_bytes() == before


def opened(root: Path, cfg: float = 3.0) -> Measurements:
    """Opens the measurements in a folder."""
    store = Measurements(root, {"cfg": cfg})
    store.start({"output_dir": str(root)})
    return store


def image(name: str, codes: tuple[int, ...] = (1, 2), ms: float = 0.125) -> Decoded:
    """Returns an image of two codes."""
    return Decoded(name, 7, list(codes), [Step(1, 0, 1, 2, 3, 6, 1, ms)], 0.5, 2, 3)


def test_damage_counts_as_missing_and_other_options_are_refused(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(0, {"ar": Measured(0.25, [image("0")])})
    (path,) = (tmp_path / "measurements").iterdir()
    whole = path.read_text()
    assert opened(tmp_path).finished(0) == {"ar": Measured(0.25, [image("0")])} and not store.finished(1)
    for bad in ('{"run": 1}', "[" * 100_000, whole[:40], whole.replace('"seconds"', '"s"')):
        path.write_text(bad)
        if bad == '{"run": 1}':
            with pytest.raises(UserError, match=str(path)):
                opened(tmp_path).finished(0)
        else:
            assert opened(tmp_path).finished(0) is None
        assert path.read_text() == bad
    path.write_text(whole)
    (tmp_path / "measurement_configs.json").unlink()
    with pytest.raises(UserError, match=str(path)):
        opened(tmp_path, cfg=2).finished(0)


def test_time_of_nested_ranges_counts_once() -> None:
    tree = [(0, 100, "tree"), (10, 40, "drafter"), (50, 60, "drafter")]
    spans = [*tree, (100, 150, "target"), (120, 130, "verify")]
    assert exclusive_time(reversed(spans)) == {"tree": 60, "drafter": 40, "target": 40, "verify": 10}
