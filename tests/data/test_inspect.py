"""Faults of a source are found before any rank starts, and say what to do."""

from pathlib import Path

import pytest

from harness.config.data_source import inspect, pieces
from harness.config.schema import DataConfig, DataKind, TokenDtype


def text(path: Path | None, **changes: object) -> DataConfig:
    return DataConfig(kind=DataKind.text, path=None if path is None else str(path), seq_len=4, **changes)


def tokens(path: Path, **changes: object) -> DataConfig:
    return DataConfig(kind=DataKind.tokens, path=str(path), seq_len=4, **changes)


def test_standard_library_is_megabytes_of_source_text() -> None:
    data = DataConfig(kind=DataKind.stdlib)
    facts = inspect(data)
    assert facts.num_tokens > 3_000_000
    assert facts.max_token == 255
    names = {piece.path.name for piece in pieces(data)}
    assert {"argparse.py", "decoder.py"} <= names
    assert not any("site-packages" in piece.path.parts or "test" in piece.path.parts for piece in pieces(data))
    assert [p.path for p in pieces(data)] == sorted((p.path for p in pieces(data)), key=Path.as_posix)


def test_counts(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for size, num_sequences in [(5, 1), (8, 1), (9, 2), (101, 25)]:
        path.write_bytes(b"x" * size)
        facts = inspect(text(path))
        assert (facts.num_tokens, facts.num_sequences, facts.max_token) == (size, num_sequences, 255)


def test_folder_of_text_leaves_out_hidden_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"bbbbbb")
    (tmp_path / "a.txt").write_bytes(b"aaa")
    (tmp_path / ".hidden").write_bytes(b"hhhhh")
    (tmp_path / "empty").write_bytes(b"")
    assert [piece.path.name for piece in pieces(text(tmp_path))] == ["a.txt", "b.txt"]
    assert inspect(text(tmp_path)).num_tokens == 9


def test_sample_finds_the_largest_token_at_both_ends(tmp_path: Path) -> None:
    for position in (0, 99_999):
        values = [1] * 100_000
        values[position] = 50_000
        path = tmp_path / f"{position}.bin"
        path.write_bytes(b"".join(value.to_bytes(2, "little") for value in values))
        assert inspect(tokens(path)).max_token == 50_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: text(None), r"data=text needs data\.path"),
        (lambda p: text(p / "nowhere"), r"data\.path=.*nowhere does not exist"),
        (lambda p: text(p / "empty"), r"is empty \(1 file, no tokens\)"),
        (lambda p: text(p / "short"), r"holds 4 tokens, too few .*data\.seq_len=4 \(it needs 5\)"),
        (lambda p: text(p / "folder"), r"is a folder without \* files"),
        (lambda p: tokens(p / "folder"), r"is a folder without \*\.bin files"),
        (lambda p: tokens(p / "odd"), r"21 bytes.*not a whole number of 2-byte tokens.*data\.token_dtype"),
        (lambda p: tokens(p / "even", token_dtype=TokenDtype.uint32), r"22 bytes.*4-byte tokens"),
        (lambda p: tokens(p / "even", header_bytes=1024), r"fewer than data\.header_bytes=1024"),
        (lambda p: tokens(p / "even", header_bytes=22), r"is empty"),
        (lambda p: DataConfig(kind=DataKind.synthetic, num_sequences=0), r"data\.num_sequences=0"),
    ],
)
def test_faults_name_value_and_fix(tmp_path: Path, make: object, message: str) -> None:
    (tmp_path / "folder").mkdir()
    for name, size in [("empty", 0), ("short", 4), ("odd", 21), ("even", 22)]:
        (tmp_path / name).write_bytes(b"x" * size)
    with pytest.raises(ValueError, match=message):
        inspect(make(tmp_path))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_bytes(b"x" * 9)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="permission denied"):
        inspect(text(tmp_path / "t"))
