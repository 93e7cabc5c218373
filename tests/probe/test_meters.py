"""Timers, memory and captures."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.fsdp import Observer
from harness.probe.capture import beside, write_step
from harness.probe.collectives import CollectiveMeter, Row
from harness.probe.flops import peak_of_name
from harness.probe.meters import ASIDE, Timers
from tests.support.mutants import finds
from tests.train.runs import described

CPU = torch.device("cpu")


def test_spans_add_up_and_start_anew() -> None:
    timers = Timers(CPU)
    for _ in range(2):
        with timers.span("outer"), timers.span("inner"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timers.span("failing"):
        raise KeyError
    spans = timers.take()
    assert 0.02 <= spans["inner"] <= spans["outer"]
    assert "failing" in spans
    assert timers.take() == {ASIDE: 0.0}


def test_waits_are_what_engines_announce() -> None:
    meter = CollectiveMeter()
    assert meter.take_waited_s() is None
    for _ in range(2):
        with Observer.waiting():
            time.sleep(0.01)
    waited = meter.take_waited_s()
    assert waited is not None
    assert waited >= 0.02
    with meter.paused(), Observer.waiting():
        pass
    assert meter.take_waited_s() is None
    meter.close()


DETACH = Observer.detach


@pytest.fixture
def meter() -> Iterator[CollectiveMeter]:
    meter = CollectiveMeter()
    yield meter
    DETACH(meter)  # where a mistake left it attached


def test_meters_see_what_any_engine_announces(meter: CollectiveMeter) -> None:
    """And nothing of it after they were closed."""
    seen: list[object] = []
    for _ in range(2):
        with Observer.announce("all_gather", "weights"), Observer.waiting():
            pass
        seen += [*meter.take(), meter.take_waited_s() is not None]
        meter.close()
    assert seen == [Row("all_gather", "weights", 1, 0), True, False]


test_an_observer_that_is_told_wrongly_is_found = finds(
    "Observers of engines",
    test_meters_see_what_any_engine_announces="""
        waits: Observers are not told of waits
            fsdp.Observer.leave: token is not None => False
        collectives: Collectives are labelled, and observers not told
            fsdp.Observer.announce: begin( => resume(
        ends: A meter that was closed goes on counting
            fsdp.Observer.detach: _observers.remove(self) => pass
    """,
)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", None),
    ],
)
def test_a_card_is_not_rated_as_the_part_in_a_server(name: str, tera: float | None) -> None:
    assert peak_of_name(name) == (None if tera is None else tera * 1e12)


def test_a_captured_step_round_trips_with_its_description(tmp_path: Path) -> None:
    gradients = {
        "z.weight": torch.arange(6.0).reshape(2, 3),
        "a.weight": torch.arange(8.0).reshape(2, 4),
        "nan": torch.tensor([float("nan"), 1.0], dtype=torch.float64),
        "inf": torch.tensor([float("inf")]),
    }
    write_step(tmp_path / "capture", 7, gradients, {"num_microbatches": 4})
    path = tmp_path / "capture" / "step-000007.safetensors"
    loaded, facts = load_file(path), described(path)
    assert facts == {"step": 7, "num_microbatches": 4}
    assert loaded.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert loaded[name].dtype is gradient.dtype
        torch.testing.assert_close(loaded[name], gradient, rtol=0, atol=0, equal_nan=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_capture_that_breaks_off_does_not_look_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step was captured before: what stands there is the former, whole."""
    folder = tmp_path / "capture"
    write_step(folder, 1, {"a": torch.zeros(2)}, {})

    def full(tensors: object, path: Path, *_: object) -> None:
        path.write_bytes(b"a part of it")
        raise OSError("no space left")

    monkeypatch.setattr("harness.probe.capture.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_step(folder, 1, {"a": torch.ones(2)}, {})
    assert load_file(folder / "step-000001.safetensors")["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_beside_gradients_lose_nothing_that_a_verdict_sees(dtype: torch.dtype) -> None:
    expected = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for gradient in (expected.to(dtype), (1.01 * expected).to(dtype)):
        stored, whole = beside(expected, gradient)
        assert (stored.dtype, whole) == (torch.float64 if dtype is torch.float64 else torch.float32, False)
        off = (gradient.double() + stored.double() - expected).abs()
        assert bool((off <= 2.0**-24 * (gradient.double() - expected).abs() + 2.0**-53 * expected.abs()).all())
    broken = expected.to(dtype)
    broken[3] = torch.inf
    for gradient in (broken, broken[:10], None):
        stored, whole = beside(expected, gradient)
        assert whole
        assert torch.equal(stored, expected)
