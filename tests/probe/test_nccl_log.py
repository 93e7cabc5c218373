"""What NCCL says it did, read from its own lines (see nccl_logs/README.md), what the record makes of it, and its
version, which is not the one torch was built with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config, NcclLog, Registration, SharpAxis
from harness.probe.network import (
    NcclFacts,
    loaded_version,
    log_of_process,
    parse,
    read,
    record,
    version_of,
    without_effect,
)
from harness.store.show import _network
from tests.support.needs import needs

LOGS = Path(__file__).parent / "nccl_logs"


def facts_of(name: str) -> NcclFacts:
    """What one of the logs tells."""
    found = read(LOGS / f"{name}.log")
    assert found is not None
    return found


def test_what_each_log_tells() -> None:
    """SHARP over two nodes; symmetric kernels and copy engines; registrations of the program; channels alone."""
    facts = facts_of("h100_sharp_2nodes_2.28")
    assert facts.version == "2.28.9+cuda12.9"
    assert facts.nvls_channels == 16
    assert facts.collnet_connected
    assert {*facts.choices["AllGather"]} >= {"NVLS/SIMPLE", "RING/LL"}
    assert facts.choices["ReduceScatter"].count("COLLNET_DIRECT/SIMPLE") == 1, "of two"
    facts = facts_of("h100_symmetric_2.30")
    assert facts.registered["symmetric"]["count"] == 2
    assert facts.registered["symmetric"]["bytes"] == 33554432 + 2097152
    assert {*facts.choices["AllGather"]} >= {"copy engine"}
    assert "symmetric ReduceScatter_LD" in facts.choices["ReduceScatter"]
    assert "symmetric AllReduce_RSxLDMC_AGxSTMC" in facts.ran
    facts = facts_of("nvls_registered_2.24")
    assert facts.registered["user"] == {"count": 1, "bytes": 20971520}
    assert [*facts.registered] == ["user"]
    assert not facts_of("a100_collnet_refused").collnet_connected


def test_lines_of_others_are_passed_over() -> None:
    assert parse(["", "Traceback (most recent call last):", "register me", "a Bytes -> b", "\x00\x01"]) == NcclFacts()


def test_a_log_cut_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    whole = (LOGS / "h100_symmetric_2.30.log").read_bytes()
    for end in range(0, len(whole), 97):
        (tmp_path / "log").write_bytes(whole[:end] + b"\xff\xfe")
        assert read(tmp_path / "log") is not None
    assert read(tmp_path / "none") is None


def test_the_log_of_this_process_is_found_by_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "50%h"
    folder.mkdir()
    named = {"NCCL_DEBUG_FILE": f"{tmp_path}/50%%h/nccl.%h.%p.log"}
    assert log_of_process(named, 12) is None
    for name in ("nccl.node.example.123.log", "nccl.node.12.log", "other.12.log"):
        (folder / name).touch()
    assert log_of_process(named, 12) == folder / "nccl.node.12.log"
    assert log_of_process(named, 123) == folder / "nccl.node.example.123.log"
    assert log_of_process({}, 12) is None


# -- the record ------------------------------------------------------------------------------------------------------


def asking(ub: str = "none", sharp: str = "none", **settings: Any) -> Config:
    """A configuration that asks for these."""
    config = Config()
    config.nccl_ub.mode, config.sharp.group = Registration[ub], SharpAxis[sharp]
    config.launch.nccl_log = settings.pop("log", NcclLog.setup)
    for name, value in settings.items():
        setattr(config.sharp, name, value)
    return config


@pytest.mark.parametrize(
    ("ub", "sharp", "backend", "told"),
    [
        ("none", "none", "gloo", None),
        ("auto", "dp", "nccl", None),
        ("auto", "none", "gloo", "nccl_ub=auto: requested, not effective: gloo has no user buffers"),
        ("manual", "dp", "gloo", "nccl_ub=manual and sharp=dp: requested, not effective: gloo"),
    ],
)
def test_what_gloo_does_not_have_is_one_sentence(ub: str, sharp: str, backend: str, told: str | None) -> None:
    text = without_effect(asking(ub, sharp), backend)
    assert (text is None) if told is None else text is not None and text.startswith(told)


def test_on_gloo_the_record_says_requested_not_effective_and_why() -> None:
    facts = record(asking("auto", "dp"), "gloo", {"requested": "auto", "effective": "none"}, None)
    assert facts["nccl_ub"]["requested"] == "auto"
    assert facts["sharp"]["requested"] == "dp: nvlink+infiniband"
    assert {facts[name]["effective"] for name in facts} == {"none"}
    assert all("gloo has no user buffers" in facts[name]["reason"] for name in facts)
    quiet = record(asking(), "gloo", {}, None)
    assert quiet == {name: {"requested": "none", "effective": "none"} for name in ("nccl_ub", "sharp")}


@pytest.mark.parametrize(
    ("log", "settings", "effective", "reason"),
    [
        ("h100_sharp_2nodes_2.28", {}, "nvlink+infiniband", ""),
        ("h100_symmetric_2.30", {"infiniband": False}, "nvlink", ""),
        ("h100_symmetric_2.30", {}, "nvlink", "infiniband: no communicator connected"),
        (
            "a100_collnet_refused",
            {},
            "none",
            "nvlink: no channels; one device a machine, or no NVLink switch; infiniband: no",
        ),
        ("nvls_registered_2.24", {}, "nvlink", "infiniband: no communicator"),
        (None, {}, "unknown", "NCCL left no log"),
        (None, {"log": NcclLog.none}, "unknown", "launch.nccl_log=none"),
    ],
)
def test_sharp_as_the_log_shows_it(log: str | None, settings: dict[str, Any], effective: str, reason: str) -> None:
    facts = record(asking(sharp="dp", **settings), "nccl", {}, facts_of(log) if log else None)
    assert facts["sharp"]["effective"] == effective
    assert reason in facts["sharp"].get("reason", "")
    assert bool(reason) == ("reason" in facts["sharp"])
    assert ("nccl" in facts) == (log is not None)


def test_what_nccl_chose_by_itself_is_recorded_and_nothing_is_missing() -> None:
    unasked = record(asking(), "nccl", {}, facts_of("h100_sharp_2nodes_2.28"))["sharp"]
    assert (unasked["requested"], unasked["effective"]) == ("none", "nvlink+infiniband")
    left = asking(sharp="default")
    facts = record(left, "nccl", {}, facts_of("h100_sharp_2nodes_2.28"))["sharp"]
    assert (facts["requested"], facts["effective"]) == ("default", "nvlink+infiniband")
    assert facts["ran"]
    assert "reason" not in facts
    assert record(left, "nccl", {}, None)["sharp"]["effective"] == "unknown"
    assert record(left, "gloo", {}, None)["sharp"] == {"requested": "default", "effective": "none"}
    assert without_effect(left, "gloo") is None


def test_whether_collectives_ran_on_registered_buffers() -> None:
    engine = {"requested": "auto", "effective": "auto, symmetric, dp"}
    ran = record(asking("auto"), "nccl", engine, facts_of("h100_symmetric_2.30"))["nccl_ub"]["kernels"]
    assert "symmetric ReduceScatter_LDMC" in ran
    assert "copy engine" in ran
    plain = record(asking("auto"), "nccl", engine, facts_of("h100_sharp_2nodes_2.28"))["nccl_ub"]["kernels"]
    assert plain.startswith("none symmetric: COLLNET_DIRECT/SIMPLE")
    untold = record(asking("auto"), "nccl", engine, facts_of("nvls_registered_2.24"))["nccl_ub"]["kernels"]
    assert "launch.nccl_log=choices" in untold


def test_a_fallback_of_the_engines_reaches_the_record_and_the_screen() -> None:
    engine = {"requested": "auto", "effective": "none", "reason": "registration with dp: out of memory"}
    facts = record(asking("auto"), "nccl", engine, None)
    assert facts["nccl_ub"] == engine
    assert _network({"network": facts}) == {"nccl_ub": "auto -> none (registration with dp: out of memory)"}


def test_nccls_number_and_that_none_is_loaded_here() -> None:
    assert [version_of(code) for code in (23_203, 22_809, 21_005)] == ["2.32.3", "2.28.9", "2.10.5"]
    assert loaded_version() is None


@needs("cc")
def test_a_library_that_was_put_before_torchs_is_the_one(tmp_path: Path) -> None:
    """A real shared library of that name, preloaded as a newer NCCL would be, under a file name of its own."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.slim.so"
    source.write_text("int ncclGetVersion(int* version) { *version = 23203; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
    words = "from harness.probe.network import loaded_version; print(loaded_version())"
    ran = subprocess.run(
        ["env", f"LD_PRELOAD={library}", sys.executable, "-c", words], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "2.32.3"
