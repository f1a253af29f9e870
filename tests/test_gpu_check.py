"""gpu_check on a CPU: the parts of it that need no GPU run at tiny dimensions, with torch.cuda stubbed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adt_tree import Pipeline
from cli import gpu_check
from eval.gpu import measure, part, summary, trace
from eval.gpu.measure import Item, Subject
from models.footprint import Use
from models.transformer import join
from tests.conftest import Run
from tests.decoding import CPU
from tests.gpu_parts import ENVIRONMENT, crash, slow
from tests.tape import Machine
from tests.tiny import tiny_use

Sent = list[tuple[str, str, Any]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Gives every family the layers of lumina_mgpt in tiny dimensions, and a drafter."""
    use = tiny_use(element=4)
    monkeypatch.setattr("models.footprint.published_use", lambda name, precision="fp32": use)
    monkeypatch.setattr(measure, "MIDDLE", 8)
    monkeypatch.setattr(measure, "PROFILED", 2)
    monkeypatch.setattr("eval.profile.PROBE_BYTES", 2**12)
    return use


def sent_by(name: str, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Returns the messages that the process of a part sends."""
    sent: Sent = []
    monkeypatch.setattr(part, "environment", lambda device: ENVIRONMENT)
    part.work(name, "cpu", SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    return sent


def test_a_family(tiny: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, _, plan), *done = sent_by("anole", monkeypatch)
    assert [name for _, name, _ in done] == plan and {kind for kind, _, _ in done} == {"rows"}
    rows = {row["method"]: row for row in part.merged([row for _, _, row in done])}
    assert set(rows) == {"ar", "self-draft", "eagle-2"}
    for row in rows.values():
        assert row["mode"] == "eager" and row["precision"] in ("fp32", "bf16")
        assert row["step_ms"] > 0 and row["read_ms"] > 0 and row["steps"] > 0
        assert row["attention"] == {"_scaled_dot_product_flash_attention_for_cpu": []}
        assert row["estimate_bytes"] > sum(weight.nbytes for weight in parameters())
    assert rows["eagle-2"]["first_s"] > 0 and rows["eagle-2"]["other_s"] > 0
    assert rows["eagle-2"]["codes"] == 16
    assert rows["ar"]["steps"] == 7, "two rows of four codes, the first of which is the prompt's"
    assert rows["eagle-2"]["estimate_bytes"] > rows["ar"]["estimate_bytes"], "a drafter's cache and its nodes"


def parameters() -> list[torch.Tensor]:
    """Returns the weights of the target's layers."""
    return list(measure.subject_of("anole", "fp32", CPU).model.decoder.blocks.parameters())


def test_graphs_and_compiled_layers(tiny: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests.tape replays the graphs on the CPU, and layers are compiled for it."""
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: Machine())
    monkeypatch.setattr("models.packed.packable", lambda weight: False)
    seconds = iter((1.0, 3.5))
    monkeypatch.setattr(measure, "compile_seconds", lambda: next(seconds))
    monkeypatch.setattr("models.model.compiled_join", lambda: join)
    subject = measure.subject_of("anole", "fp32", CPU)
    eager, graphs, compiled = (
        Item("anole", "fp32", "ar", mode, "steps") for mode in ("eager", "graphs", "compiled")
    )
    assert measure.steps(subject, graphs)["step_ms"] > 0
    assert "estimate_bytes" not in measure.steps(subject, graphs)
    assert measure.steps(subject, compiled)["compile_s"] == 2.5
    assert "attention" not in measure.launches(subject, graphs)
    first = measure.first_images(subject, graphs)
    assert first["estimate_bytes"] > measure.steps(subject, eager)["estimate_bytes"]
    monkeypatch.setattr("models.model.CudaRecorder", lambda device: Machine(fail_at=1))
    with pytest.raises(RuntimeError, match="CUDA graphs"):
        measure.steps(subject, graphs)


def test_a_compiler_is_timed() -> None:
    before = measure.compile_seconds()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert measure.compile_seconds() > before


def test_equal_images(tiny_checkpoint: Path) -> None:
    """In fp32 the tiny checkpoint makes the AR baseline's images; another seed makes others."""
    pipe = Pipeline.from_pretrained(str(tiny_checkpoint), device="cpu", precision="fp32")
    subject = Subject(pipe.model, pipe.requests(["sun", "pizza", "red heart"], 1))
    rates = [
        measure.images(subject, Item("emoji", "fp32", name, "eager", "images"))["same_image"]
        for name in measure.EXACT
    ]
    assert len(rates) > 5 and set(rates) == {1.0}
    subject.requests = pipe.requests(["sun", "pizza", "red heart"], [1, 2, 99])
    again = measure.images(subject, Item("emoji", "fp32", "self-draft", "eager", "images"))
    assert again["same_image"] == pytest.approx(2 / 3)


def test_what_does_not_fit_is_named(tiny: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.footprint.free_bytes", lambda device: 10)
    _, (_, _, plan), *done = sent_by("compiled", monkeypatch)
    assert [name for _, name, _ in done] == plan
    assert all(kind == "left_out" and "GB" in reason for kind, _, reason in done)
    assert {name.split(" ")[0] for name in plan} == set(measure.RANDOM_WEIGHTS)


def test_one_fault_does_not_end_a_part(tiny: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject, item: Item) -> measure.Figures:
        raise (torch.OutOfMemoryError("CUDA out of memory. Tried") if item.method == "ar" else OSError("bad"))

    monkeypatch.setitem(measure.STAGES, "launches", broken)
    _, _, *done = sent_by("anole", monkeypatch)
    kinds = {name: (kind, value) for kind, name, value in done}
    assert kinds["anole ar, eager: launches"] == ("left_out", "CUDA out of memory")
    assert kinds["anole self-draft, eager: launches"] == ("failed", "OSError: bad")
    assert [kind for kind, _, _ in done].count("rows") == 4


def test_memory_of_graphs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of graphs is that of their pools less the tensors in them, which the peak of allocated
    memory includes."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 10},
        {"segment_pool_id": (0, 1), "total_size": 70, "allocated_size": 20},
        {"segment_pool_id": (1, 0), "total_size": 7, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    assert measure.held_bytes(torch.device("cuda")) == 500 + 50 + 7


def event(name: str, number: int = 0, children: Any = (), kernels: Any = ()) -> Any:
    """Returns an event of the profiler."""
    kernels = [SimpleNamespace(name=kernel) for kernel in kernels]
    return SimpleNamespace(name=name, id=number, cpu_children=list(children), kernels=kernels)


def test_launches_and_kernels_are_counted() -> None:
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync"]
    events = [event(name, number) for number, name in enumerate(names)]
    others = ["cudaStreamSynchronize", "cudaEventRecord", "aten::mm", "cudaStreamIsCapturing"]
    events += [event(name, 9) for name in others] + [event("cuLaunchKernel", 0)]  # the runtime's own
    assert trace.launches(events) == 5
    inner = event("aten::_efficient_attention_forward", kernels=["void fmha<64, 64>(Params)"])
    backend = event("aten::_scaled_dot_product_efficient_attention", children=[inner])
    above = event("aten::scaled_dot_product_attention", children=[event("aten::pad"), backend])
    expected = {"_scaled_dot_product_efficient_attention": ["void fmha<64, 64>(Params)"]}
    assert trace.attention([above, backend, inner, event("aten::mm", kernels=["gemm"])]) == expected
    assert summary.short("void fmha<64, 64>(Params)") == "fmha"


def test_a_part_that_runs_out_of_time_is_ended_and_named() -> None:
    result = part.run_part("anole", "cpu", 10, slow)
    assert [row["step_ms"] for row in result["rows"]] == [1.0] and not result["failed"]
    assert list(result["left_out"]) == ["second"] and "10 s" in result["left_out"]["second"]
    assert result["environment"] == ENVIRONMENT and result["seconds"] < 20


def test_a_process_that_dies_is_named() -> None:
    result = part.run_part("anole", "cpu", 60, crash)
    assert result["left_out"] == {"first": "it is too large"}
    assert list(result["failed"]) == ["second"] and "status 7" in result["failed"]["second"]


def test_without_pytest_tests_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "find_spec", lambda name: None)
    (_, (kind, name, reason)) = sent_by("tests", monkeypatch)
    assert (kind, name) == ("left_out", "tests") and "pytest" in reason


def test_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests with the mark one passes, one fails and one is skipped; a fourth has no mark."""
    (tmp_path / "tests").mkdir()
    lines = ["import pytest"]
    for name, does in (("a", "pass"), ("b", "assert 0"), ("c", "pytest.skip('')")):
        lines += ["@pytest.mark.gpu", f"def test_{name}():", f"    {does}"]
    (tmp_path / "tests" / "test_gpu.py").write_text("\n".join([*lines, "def test_d():", "    assert 0"]))
    monkeypatch.setattr(part, "ROOT", tmp_path)
    _, (kind, _, value) = sent_by("tests", monkeypatch)
    assert kind == "tests" and (value["passed"], value["skipped"]) == (1, 1)
    assert [name.partition("::")[2] for name in value["failed"]] == ["test_b"]


def row(model: str, method: str, step_ms: float, mode: str = "graphs", weights_mb: float = 13_000) -> dict:
    """Returns a row of results; reading its weights takes 10 ms."""
    figures = {"step_ms": step_ms, "read_ms": 10.0, "weights_mb": weights_mb}
    return {"model": model, "precision": "bf16", "method": method, "mode": mode, **figures}


def result(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the result of a part."""
    base = {"environment": ENVIRONMENT, "rows": list(rows), "tests": [], "left_out": {}, "failed": {}}
    return {**base, "seconds": 1.0, **more}


BOUNDS = [
    ([row("anole", "ar", 12.9), row("anole", "self-draft", 17.3)], []),
    ([row("anole", "ar", 13.1), row("anole", "self-draft", 17.3)], [("anole", "ar", "1.3 x")]),
    ([row("anole", "ar", 12.0), row("anole", "self-draft", 16.3)], [("anole", "self-draft", "1.35 x")]),
    ([row("anole", "ar", 99.0, "eager"), row("emu3", "ar", 99.0)], [("emu3", "ar", "1.3 x")]),
    ([row("janus_pro", "ar", 99.0, weights_mb=2500), row("janus_pro", "self-draft", 999.0)], []),
]


@pytest.fixture
def check(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, dict]]:
    """Returns a function that runs gpu_check as on a machine with a GPU whose parts have these results:
    results -> (status, text, document)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def call(words: str, results: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(part, "run_part", lambda name, device, seconds: results[name])
        status, out, _ = run("gpu_check", *words.split(), "--output_dir", str(tmp_path / "o"))
        *text, last = out.splitlines()
        return status, "\n".join(text), json.loads(last)

    return call


@pytest.mark.parametrize(("rows", "expected"), BOUNDS)
def test_bounds(rows: list, expected: list, check: Callable[..., Any]) -> None:
    """Every missed bound gives a line and exit status 1. Small models and direct calls are not judged."""
    status, text, document = check("anole", {"anole": result(*rows)})
    assert status == bool(expected) and len(document["missed"]) == len(expected)
    for line, names in zip(document["missed"], expected, strict=True):
        assert line in text.splitlines() and all(name in line for name in names)


def test_everything_that_fails_or_is_left_out_is_named(check: Callable[..., Any]) -> None:
    parts = {"tests": result(tests=[{"passed": 3, "skipped": 0, "failed": ["test_gpu.py::test_x"]}])}
    parts["emu3"] = result(left_out={"emu3": "it needs 18 GB"}, failed={"emu3 ar": "OSError: bad"})
    status, text, document = check("tests emu3", parts)
    assert status == 1 and len(document["missed"]) == 2 and document["tests"]["passed"] == 3
    for name in ("test_x", "OSError: bad", "it needs 18 GB", "llamagen2", "compiled"):
        assert name in text


def test_parts_that_ran_alone_stand_in_one_table(check: Callable[..., Any]) -> None:
    check("anole", {"anole": result(row("anole", "ar", 12.0))})
    status, text, document = check("emu3", {"emu3": result(row("emu3", "ar", 12.0))})
    assert status == 0 and [one["model"] for one in document["rows"]] == ["anole", "emu3"]
    assert text.count("| 12.00 |") == 2 and "anole" not in document["left_out"]
    other = result(row("emoji", "ar", 1.0), environment={**ENVIRONMENT, "device": "another"})
    _, _, document = check("emoji", {"emoji": other})
    assert [one["model"] for one in document["rows"]] == ["emoji"] and "emu3" in document["left_out"]


def test_bad_words_and_no_gpu_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, name in (([], "no GPU"), (["anol"], "anol")):
        status, out, err = run("gpu_check", *words)
        assert (status, out, err.count("\n")) == (2, "", 1) and name in err
    assert set(gpu_check.PARTS) == {"tests", measure.EMBEDDED, *measure.RANDOM_WEIGHTS, "compiled"}
