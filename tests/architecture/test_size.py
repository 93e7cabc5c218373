"""The packages have no circles."""

from __future__ import annotations

import pytest

from benchmarks.checks.structure import ROOT, circles


@pytest.mark.parametrize("package", ["harness", "harness.fsdp"])
def test_no_two_packages_import_each_other(package: str) -> None:
    assert circles(ROOT, package) == []


def test_a_circle_is_seen(tmp_path) -> None:
    for name, other in (("a", "b"), ("b", "a"), ("c", "a")):
        (tmp_path / "harness" / name).mkdir(parents=True)
        (tmp_path / "harness" / name / "__init__.py").write_text(f"import harness.{other}")
    assert circles(tmp_path, "harness") == [("a", "b")]
