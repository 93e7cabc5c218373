"""One global batch whatever the layout; a digest of what was fed."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config.data_source import count_sequences, pieces
from harness.config.schema import Config, DataConfig, DataKind, TokenDtype
from harness.data.loader import Loader, global_digest, sequence_digest
from harness.data.order import sequence_at
from harness.data.sources import FileSource, SyntheticSource
from harness.engines import protocol as engine
from harness.train.feed import Feed, joined
from tests.support.factory import small_config
from tests.support.mutants import finds

LAYOUTS = [(ranks, size) for ranks in (1, 2, 3, 4) for size in (1, 2) if 24 % (ranks * size) == 0]


def global_batch(config: Config, step: int) -> tuple[np.ndarray, str]:
    """Tokens and targets of all ranks in rank order, as rows of seq_len + 1, and the global digest."""
    batches = [Loader(config, rank).batch(step) for rank in range(config.mesh.world_size)]
    rows = [
        np.concatenate([tokens[row], targets[row][-1:]])
        for batch in batches
        for tokens, targets in batch
        for row in range(len(tokens))
    ]
    return np.stack(rows), global_digest([held(config, rank, step) for rank in range(len(batches))])


def held(config: Config, rank: int, step: int) -> int:
    """The digest of what a rank should be fed; it is what the loader gives."""
    batch = [engine.Microbatch(*map(torch.from_numpy, each)) for each in Loader(config, rank).batch(step)]
    held, fed = Feed(config, rank).digests(step, joined(batch))
    assert fed == held
    return held


@pytest.mark.parametrize("kind", [DataKind.synthetic, DataKind.stdlib])
def test_global_batch_does_not_depend_on_ranks_or_microbatches(kind: DataKind) -> None:
    seen = []
    for world_size, size in LAYOUTS:
        config = small_config(
            data__kind=kind,
            model__vocab_size=256,
            mesh__world_size=world_size,
            train__microbatch_size=size,
            train__global_batch_size=24,
        )
        seen.append(global_batch(config, step=5))
    first_rows, first_digest = seen[0]
    for rows, digest in seen[1:]:
        np.testing.assert_array_equal(rows, first_rows)
        assert digest == first_digest


def test_ranks_see_different_sequences() -> None:
    config = small_config(mesh__world_size=4)
    rows = [Loader(config, rank).batch(1) for rank in range(4)]
    flat = [tuple(row) for batch in rows for tokens, _ in batch for row in tokens]
    assert len(set(flat)) == len(flat) == 8


def test_targets_are_the_next_tokens() -> None:
    for tokens, targets in Loader(small_config(), 0).batch(1):
        np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.shape == (2, 16)
        assert tokens.dtype == np.int64


def test_steps_are_random_access_and_wrap_into_a_new_order() -> None:
    config = small_config()  # 64 sequences, 8 a step: an epoch is 8 steps
    epochs = [[global_batch(config, step)[0] for step in range(first, first + 8)] for first in (1, 9)]
    first, second = (sorted(tuple(row) for batch in epoch for row in batch) for epoch in epochs)
    assert first == second, "both epochs hold every sequence"
    assert not np.array_equal(epochs[0][0], epochs[1][0]), "in different orders"
    assert held(config, 0, 12) != held(config, 0, 4)


@pytest.mark.parametrize("change", ["token", "position", "swap"])
def test_digest_sees_any_change(change: str) -> None:
    a, b = np.arange(17), np.arange(17)[::-1].copy()
    base = global_digest([sequence_digest(0, a), sequence_digest(1, b)])
    changed = a.copy()
    changed[-1] += 1
    others = {
        "token": [sequence_digest(0, changed), sequence_digest(1, b)],
        "position": [sequence_digest(2, a), sequence_digest(1, b)],
        "swap": [sequence_digest(0, b), sequence_digest(1, a)],
    }
    assert global_digest(others[change]) != base


def test_digest_ignores_the_width_of_the_file() -> None:
    tokens = np.arange(17, dtype=np.uint16)
    assert sequence_digest(3, tokens.astype(np.int64)) == sequence_digest(3, tokens)


@pytest.mark.parametrize(("width", "header"), list(itertools.product(["uint16", "uint32"], [0, 1024])))
def test_token_files_read_as_one_stream(tmp_path: Path, width: str, header: int) -> None:
    """Sequences cross file boundaries, headers are skipped, files follow one another by name."""
    stream = np.random.default_rng(0).integers(0, 60000, 1000)
    cuts = [0, 3, 400, 401, 1000]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        body = stream[start:stop].astype(width).tobytes()
        (tmp_path / f"part{number}.bin").write_bytes(b"\xff" * header + body)
    config = small_config(
        data__kind=DataKind.tokens,
        data__path=str(tmp_path),
        data__token_dtype=TokenDtype[width],
        data__header_bytes=header,
    )
    source = FileSource(pieces(config.data), 16)
    assert source.num_sequences == (1000 - 1) // 16
    for index in range(source.num_sequences):
        np.testing.assert_array_equal(source[index], stream[index * 16 : index * 16 + 17])
    config.model.vocab_size = 60000
    for step in range(1, 9):  # an epoch is 7.75 steps
        held(config, 0, step)


def test_large_files_are_mapped(tmp_path: Path) -> None:
    stream = np.random.default_rng(1).integers(0, 65536, 600_000).astype(np.uint16)
    stream.tofile(tmp_path / "big.bin")
    config = small_config(data__kind=DataKind.tokens, data__path=str(tmp_path / "big.bin"))
    source = FileSource(pieces(config.data), 16)
    assert isinstance(source._map(source.pieces[0]), np.memmap)
    np.testing.assert_array_equal(source[30_000], stream[480_000:480_017])


def test_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = np.zeros(200, dtype=np.uint16)
    tokens[150] = 64
    tokens.tofile(tmp_path / "t.bin")
    config = small_config(data__kind=DataKind.tokens, data__path=str(tmp_path / "t.bin"))
    loader = Loader(config, 0)
    with pytest.raises(ValueError, match=r"token 64 .*model\.vocab_size=64.*data\.token_dtype"):
        list(map(loader.batch, range(1, 4)))


def test_synthetic_tokens_are_in_range_and_skewed() -> None:
    source = SyntheticSource(50, 64, vocab_size=100, seed=3)
    tokens = np.concatenate([source[i] for i in range(50)])
    assert tokens.min() >= 0
    assert tokens.max() < 100
    assert 28 < tokens.mean() < 38, "the smaller of two uniform numbers has mean 1/3"
    assert not np.array_equal(source[0], SyntheticSource(50, 64, 100, seed=4)[0])


test_a_mutant_is_found = finds(
    "What a run is fed",
    test_steps_are_random_access_and_wrap_into_a_new_order="""
        from step 0: The first step is fed the second batch
            data.loader.positions: (step - 1) * => step *
    """,
    test_ranks_see_different_sequences="""
        ranks overlap: Ranks begin one sequence apart
            data.loader.positions: data_rank * own => data_rank
    """,
    test_targets_are_the_next_tokens="""
        targets are the tokens: Targets are the tokens themselves
            data.loader.Loader.batch: rows[:, 1:] => rows[:, :-1]
    """,
    test_digest_sees_any_change="""
        wherever it is fed: A digest does not say at which position a sequence was fed
            data.loader.sequence_digest: position.to_bytes(8, "little") => b""
            (change="position")
        the last rank's: The digest of a step is that of one rank
            data.loader.global_digest: sum(parts) => parts[-1]
            (change="token")
    """,
    test_token_beyond_the_vocabulary_is_named="""
        one too many: A token as large as the vocabulary is let through
            data.loader.Loader._sequence: largest >= vocab_size => largest > vocab_size
    """,
    test_large_files_are_mapped="""
        no last target: A sequence of a file lacks its last target
            data.sources.FileSource.__getitem__: + self.seq_len + 1 => + self.seq_len
    """,
    test_synthetic_tokens_are_in_range_and_skewed="""
        the larger half: Large token ids are the likely ones
            data.sources.SyntheticSource.__getitem__: np.minimum( => np.maximum(
    """,
)


# -- the global order: a permutation an epoch, a pure function of the position -----------------------------------------


def epoch(number: int, size: int, seed: int = 7) -> list[int]:
    return [sequence_at(number * size + i, size, seed) for i in range(size)]


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 1000])
def test_every_epoch_holds_every_sequence_once(size: int) -> None:
    for number in (0, 1, 9):
        assert sorted(epoch(number, size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch(0, 200), epoch(1, 200), epoch(0, 200, seed=8)]
    for i in range(3):
        for j in range(i):
            agreeing = sum(a == b for a, b in zip(orders[i], orders[j], strict=True))
            assert agreeing < 12, "two independent permutations agree in about one place"


@pytest.mark.parametrize("size", [10, 200])
def test_all_places_and_all_distances_are_equally_likely(size: int) -> None:
    """Chi-squared over 4,000 seeds of where sequence 0 goes, and how far from it sequence 1."""
    firsts = [(sequence_at(0, size, seed), sequence_at(1, size, seed)) for seed in range(4000)]
    places = Counter(first for first, _ in firsts)
    gaps = Counter((second - first) % size for first, second in firsts)
    for counts, cells in ((places, size), (gaps, size - 1)):
        expected = 4000 / cells
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values()) / (cells - 1)
        assert chi_squared < 2.2


def test_order_is_pinned() -> None:
    """A change here makes every old run incomparable to every new one."""
    assert [sequence_at(i, 10, 1234) for i in range(12)] == [1, 8, 6, 3, 0, 2, 5, 9, 7, 4, 4, 5]


# -- faults of a source are found before any rank starts, and say what to do -------------------------------------------


def text(path: Path | None, **changes: object) -> DataConfig:
    return DataConfig(kind=DataKind.text, path=None if path is None else str(path), seq_len=4, **changes)


def tokens(path: Path, **changes: object) -> DataConfig:
    return DataConfig(kind=DataKind.tokens, path=str(path), seq_len=4, **changes)


def test_standard_library_is_megabytes_of_source_text() -> None:
    data = DataConfig(kind=DataKind.stdlib)
    assert sum(piece.num_tokens for piece in pieces(data)) > 3_000_000
    names = {piece.path.name for piece in pieces(data)}
    assert {"argparse.py", "decoder.py"} <= names
    assert not any("site-packages" in piece.path.parts or "test" in piece.path.parts for piece in pieces(data))
    assert [p.path for p in pieces(data)] == sorted((p.path for p in pieces(data)), key=Path.as_posix)


def test_counts(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for size, num_sequences in [(5, 1), (8, 1), (9, 2), (101, 25)]:
        path.write_bytes(b"x" * size)
        assert count_sequences(text(path)) == num_sequences


def test_folder_of_text_leaves_out_hidden_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(b"bbbbbb")
    (tmp_path / "a.txt").write_bytes(b"aaa")
    (tmp_path / ".hidden").write_bytes(b"hhhhh")
    (tmp_path / "empty").write_bytes(b"")
    assert [(piece.path.name, piece.num_tokens) for piece in pieces(text(tmp_path))] == [("a.txt", 3), ("b.txt", 6)]


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
    ],
)
def test_faults_name_value_and_fix(tmp_path: Path, make: object, message: str) -> None:
    (tmp_path / "folder").mkdir()
    for name, size in [("empty", 0), ("short", 4), ("odd", 21), ("even", 22)]:
        (tmp_path / name).write_bytes(b"x" * size)
    with pytest.raises(ValueError, match=message):
        count_sequences(make(tmp_path))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_bytes(b"x" * 9)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="permission denied"):
        count_sequences(text(tmp_path / "t"))
