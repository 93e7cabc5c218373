"""Text that fits."""

from __future__ import annotations

import pytest

from harness.store.labels import named
from harness.store.screen import UNLIMITED, counted, fold, shorten, table, width
from tests.support.mutants import each_found_by

HEAD, ROWS = ("run", "state", "what"), [("a-long-name-of-a-run-0123abcd", "done", "x" * 40), ("b-89abcdef", "", "")]


def test_names_are_told_by_what_differs() -> None:
    names = ["tiny-native-optim-dp2-0123abcd", "tiny-ddp-no_shard-dp2-89abcdef"]
    assert list(named(names).values()) == ["native-optim-0123abcd", "ddp-no_shard-89abcdef"]
    assert named(names[:1]) == {names[0]: names[0]}
    assert named(["a", "a-b"]) == {"a": "a", "a-b": "b"}


def test_a_firm_column_gives_way_last() -> None:
    rows = [("a-long-name-0123abcd", "x" * 40)]
    assert table(("run", "why"), rows, 46, flexible=(0, 1), firm=(0,))[2].split()[0] == rows[0][0]
    assert table(("run", "why"), rows, 30, flexible=(0, 1), firm=(0,))[2].endswith("…xxxxxxxxx")
    assert [line.split() for line in table(("run", "why"), rows, 99, breaks=(1,), rule=False)] == [
        ["run"],
        ["why"],
        [rows[0][0]],
        [rows[0][1]],
    ]


def test_what_is_shortened_keeps_its_end() -> None:
    assert shorten("a-long-name-of-a-run-0123abcd", 16) == "a-long…-0123abcd"
    assert shorten("short", 16) == "short"
    assert [counted(count, "run") for count in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_flexible_columns_give_way_and_no_line_is_wider_than_the_room() -> None:
    whole = table(HEAD, ROWS)
    assert whole[2] == "  ".join(ROWS[0][:2]) + "   " + ROWS[0][2]
    tight = table(HEAD, ROWS, 50, flexible=(0, 2))
    assert max(map(len, tight)) == 50
    assert tight[2].split()[1] == "done"
    assert tight[2].split()[0].endswith("-0123abcd")
    assert max(map(len, table(HEAD, ROWS, 20, flexible=(0, 2)))) <= 20


def test_a_row_without_room_goes_on_below_and_loses_no_value() -> None:
    """Of columns that may not be shortened every character is there, however narrow the terminal."""
    rows = [("0123456789" * 2, "EQUIVALENT", "12.5 %", "3.1e-07"), ("b", "DIFFERENT", "", "inf")]
    for columns in (60, 40, 25):
        lines = table(("run", "verdict", "of the bound", "worst"), rows, columns, flexible=(0,))
        assert max(map(len, lines)) <= columns
        text = "\n".join(lines)
        assert all(value in text for row in rows for value in row[1:])
    assert [line.split() for line in lines[:2]] == [["run", "verdict"], ["of", "the", "bound", "worst"]]
    assert lines[-1] == "    " + "inf".rjust(17)


test_a_mutant_is_found = each_found_by(
    "The terminal",
    """
        cut rows: A table without room cuts its rows, and the numbers at their ends are gone
            store.screen.table: lambda *words, **flags: [line[: words[2]] for line in was(*words[:2], **flags)]
    """,
    test_a_row_without_room_goes_on_below_and_loses_no_value,
)


def test_words_go_on_in_the_next_line() -> None:
    lines = table(
        ("check", "n"), [("update by the rule, worst piece", "16"), ("loss", "1")], 20, flexible=(0,), folded=(0,)
    )
    assert lines[2:] == ["update by the     16", "rule, worst", "piece", "loss              1"]


def test_sentences_are_folded_and_long_words_stay_whole() -> None:
    assert fold("one two three", 8, "  ") == ["one two", "  three"]
    assert fold("a /very/long/path/that/is/copied", 8) == ["a", "/very/long/path/that/is/copied"]
    assert fold("", 8) == [""]


def test_a_pipe_gets_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert width() == UNLIMITED
    monkeypatch.setenv("COLUMNS", "80")
    assert width() == 80
