"""The text DataModule: what it reads, how it splits, and when it rebuilds its token files."""

from __future__ import annotations

import json
import pickle
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from examples.gpt import corpus as corpus_module
from examples.gpt import tokens as tokens_module
from examples.gpt.corpus import standard_library
from examples.gpt.data import TextData
from examples.gpt.tokenizer import BPETokenizer
from examples.gpt.tokens import TRAIN, VALIDATION, BlockDataset, TokenFiles, default_cache_dir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for number in range(20):
        place = root / "sub" if number % 2 else root
        (place / f"{number:02}.txt").write_text(f"file {number}: " + "abc " * (50 + number))
    return root


@pytest.fixture
def make(tmp_path: Path, folder: Path):
    def build(**arguments: object) -> TextData:
        defaults = {"path": str(folder), "block_size": 16, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
        return TextData(**{**defaults, **arguments})

    return build


def blocks(data: TextData, split: str) -> BlockDataset:
    return BlockDataset(data.check(), split, data.block_size)


def names(data: TextData, held_out: bool) -> list[str]:
    return [entry["name"] for entry in data.record["documents"] if entry["held_out"] is held_out]


class TestBlocks:
    def test_blocks_cover_the_text_without_overlap(self, make, folder: Path) -> None:
        data = make()
        dataset = blocks(data, TRAIN)
        text = b"".join((folder / name).read_bytes() + b"\n" for name in names(data, held_out=False))
        covered = torch.cat([dataset[index][0] for index in range(len(dataset))])
        assert bytes(covered.tolist()) == text[: len(covered)]
        assert len(text) - 1 - len(covered) < 16

    def test_targets_are_the_tokens_that_follow(self, make) -> None:
        dataset = blocks(make(), TRAIN)
        for index in (0, len(dataset) - 2):
            x_T, y_T = dataset[index]
            assert x_T.dtype == y_T.dtype == torch.int64
            assert x_T.shape == y_T.shape == (16,)
            assert torch.equal(x_T[1:], y_T[:-1])
            assert y_T[-1] == dataset[index + 1][0][0]

    def test_beyond_the_end_is_an_index_error(self, make) -> None:
        dataset = blocks(make(), TRAIN)
        with pytest.raises(IndexError):
            dataset[len(dataset)]
        assert len(list(dataset)) == len(dataset)

    def test_a_dataset_travels_without_its_tokens(self, make) -> None:
        dataset = blocks(make(), TRAIN)
        expected = dataset[1]
        assert len(pickle.dumps(dataset)) < 10_000
        copy = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(copy[1][0], expected[0])

    def test_loaders_give_batches_of_pairs(self, make) -> None:
        data = make()
        data.setup("fit")
        for loader in (data.train_dataloader(), data.val_dataloader()):
            x_BT, y_BT = next(iter(loader))
            assert x_BT.shape == y_BT.shape == (4, 16)
        first = torch.stack([blocks(data, VALIDATION)[index][0] for index in range(4)])
        assert torch.equal(next(iter(data.val_dataloader()))[0], first)


class TestSplit:
    def test_held_out_files_are_in_one_split_only(self, make, folder: Path) -> None:
        data = make(validation_fraction=0.25)
        train, validation = names(data, held_out=False), names(data, held_out=True)
        assert len(validation) == 5
        every = {path.relative_to(folder).as_posix() for path in folder.rglob("*.txt")}
        assert set(train) | set(validation) == every
        assert not set(train) & set(validation)
        assert train == sorted(train)

    def test_split_depends_on_names_alone(self, make, folder: Path) -> None:
        before = names(make(), held_out=True)
        for path in folder.rglob("*.txt"):
            path.write_text(path.read_text() + "more")
        assert names(make(), held_out=True) == before

    def test_of_a_single_file_the_end_is_held_out(self, make, tmp_path: Path) -> None:
        path = tmp_path / "book.txt"
        path.write_bytes(bytes(range(97, 117)) * 50)
        data = make(path=str(path), validation_fraction=0.1)
        assert data.record["num_tokens"] == {TRAIN: 901, VALIDATION: 101}
        last = blocks(data, VALIDATION)[0][0]
        assert bytes(last.tolist()) == path.read_bytes()[900:916]

    def test_hidden_and_binary_files_are_passed_over(self, make, folder: Path) -> None:
        before = make().record["documents"]
        (folder / ".hidden").write_text("x" * 100)
        (folder / ".git").mkdir()
        (folder / ".git" / "config").write_text("x" * 100)
        (folder / "image.png").write_bytes(b"\x89PNG\0\0")
        (folder / "empty.txt").write_text("")
        assert make().record["documents"] == before

    def test_pattern_chooses_files(self, make) -> None:
        data = make(pattern="sub/*.txt")
        every = names(data, held_out=False) + names(data, held_out=True)
        assert len(every) == 10
        assert all(name.startswith("sub/") for name in every)


class TestStandardLibrary:
    def test_it_is_the_library_without_tests_and_packages(self) -> None:
        corpus = standard_library(0.05)
        listed = [document.name for document in corpus.documents]
        assert listed == sorted(listed)
        assert "ast.py" in listed
        assert "json/decoder.py" in listed
        assert not [name for name in listed if {"site-packages", "test", "tests"} & set(Path(name).parts)]
        assert len(listed) > 400
        held_out = sum(document.held_out for document in corpus.documents)
        assert held_out == round(0.05 * len(listed))
        assert f"{sys.version_info.major}.{sys.version_info.minor}" in corpus.source

    def test_record_names_files_and_hash(self, tmp_path: Path) -> None:
        data = TextData(cache_dir=str(tmp_path))
        record = data.record
        size = sum(
            (Path(sysconfig.get_path("stdlib")) / entry["name"]).stat().st_size + 1 for entry in record["documents"]
        )
        assert sum(record["num_tokens"].values()) == size
        assert len(record["sha256"]) == 64
        assert json.loads((data.files.folder / "corpus.json").read_text()) == record

    def test_an_interpreter_without_sources_says_so(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(ValueError, match="no library sources.*data=text data.path="):
            TextData(cache_dir=str(tmp_path))


class TestCache:
    @pytest.fixture
    def writes(self, monkeypatch) -> list[Path]:
        seen: list[Path] = []
        write = tokens_module._write

        def counted(folder: Path, *arguments: object) -> None:
            seen.append(folder)
            write(folder, *arguments)

        monkeypatch.setattr(tokens_module, "_write", counted)
        return seen

    def test_same_text_is_tokenized_once(self, make, writes: list[Path]) -> None:
        first, second = make(), make()
        first.prepare_data()
        second.prepare_data()
        second.setup("fit")
        assert len(writes) == 1
        assert first.files.folder == second.files.folder

    @pytest.mark.parametrize("change", ["content", "name", "split", "tokenizer"])
    def test_what_changes_the_tokens_is_built_anew(self, make, folder: Path, writes: list[Path], change: str) -> None:
        make().prepare_data()
        arguments: dict[str, object] = {}
        if change == "content":
            (folder / "00.txt").write_text("something else " * 20)
        elif change == "name":
            (folder / "00.txt").rename(folder / "zz.txt")
        elif change == "split":
            arguments = {"validation_fraction": 0.5}
        else:
            pytest.importorskip("tokenizers")
            arguments = {"tokenizer": "bpe", "vocab_size": 260}
        make(**arguments).prepare_data()
        assert len(writes) == 2

    def test_where_the_text_lies_does_not_matter(self, make, folder: Path, writes: list[Path]) -> None:
        make().prepare_data()
        moved = folder.rename(folder.parent / "elsewhere")
        make(path=str(moved)).prepare_data()
        assert len(writes) == 1

    @pytest.mark.parametrize("damage", ["corpus.json", "train.bin", "validation.bin"])
    @pytest.mark.parametrize("how", ["missing", "cut"])
    def test_a_damaged_entry_is_rebuilt(self, make, writes: list[Path], damage: str, how: str) -> None:
        files = make().check()
        path = files.folder / damage
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 2])
        assert make().check().complete
        assert path.read_bytes() == whole
        assert len(writes) == 2

    def test_racing_ranks_agree_and_leave_nothing_behind(self, make, tmp_path: Path) -> None:
        modules = [make() for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(TextData.check, modules))
        assert {files.folder for files in found} == {found[0].folder}
        assert found[0].complete
        assert list((tmp_path / "cache").iterdir()) == [found[0].folder]

    def test_a_failed_build_leaves_nothing_behind(self, make, tmp_path: Path, monkeypatch) -> None:
        def fail(folder: Path, *arguments: object) -> None:
            (folder / "train.bin").write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(tokens_module, "_write", fail)
        with pytest.raises(OSError, match="disk full"):
            make().check()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_default_place_follows_the_environment(self, monkeypatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert default_cache_dir() == Path("/somewhere/lightning_par")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_cache_dir() == Path.home() / ".cache" / "lightning_par"

    def test_an_absent_entry_is_not_complete(self, tmp_path: Path) -> None:
        assert not TokenFiles(tmp_path / "nothing").complete


class TestTokenizers:
    def test_bytes_spell_anything(self, make) -> None:
        data = make()
        assert data.vocab_size == 256
        assert data.encode("aé") == [97, 0xC3, 0xA9]
        assert data.decode(data.encode("naïve 日本")) == "naïve 日本"
        assert data.decode([97, 0xFF]) == "a\ufffd"

    def test_bpe_is_trained_on_the_training_files_and_kept(self, make, monkeypatch) -> None:
        pytest.importorskip("tokenizers")
        data = make(tokenizer="bpe", vocab_size=270)
        assert data.check().record["tokenizer"] == "bpe"
        assert data.tokenizer.vocab_size <= 270
        assert len(data.encode("abc abc abc")) < len("abc abc abc")
        assert data.decode(data.encode("naïve 日本")) == "naïve 日本"
        assert data.files.dtype.name == "uint16"

        def untrained(*arguments: object) -> None:
            raise AssertionError("the tokenizer was in the cache")

        monkeypatch.setattr(BPETokenizer, "train", untrained)
        again = make(tokenizer="bpe", vocab_size=270)
        assert again.encode("abc file") == data.encode("abc file")

    def test_bpe_tokens_on_disk_decode_to_the_text(self, make, folder: Path) -> None:
        pytest.importorskip("tokenizers")
        data = make(tokenizer="bpe")
        assert data.vocab_size == 4096
        dataset = blocks(data, TRAIN)
        tokens = torch.cat([dataset[index][0] for index in range(len(dataset))])
        text = "".join((folder / name).read_text() + "\n" for name in names(data, held_out=False))
        assert text.startswith(data.decode(tokens.tolist()))

    def test_ids_beyond_the_vocabulary_decode_to_nothing(self, make) -> None:
        pytest.importorskip("tokenizers")
        data = make(tokenizer="bpe", vocab_size=270)
        assert data.decode([*data.encode("abc"), 50_000]) == "abc"

    def test_missing_package_says_what_to_install(self, make, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ValueError, match="pip install tokenizers"):
            make(tokenizer="bpe").check()


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"path": "/no/such/place"}, "data.path=/no/such/place: no such file or folder"),
            ({"pattern": "*.rst"}, r"no text file there matches data.pattern='\*.rst'"),
            ({"tokenizer": "words"}, "data.tokenizer='words' must be one of bytes, bpe"),
            ({"vocab_size": 300}, "data.vocab_size=300: the bytes tokenizer has 256"),
            ({"tokenizer": "bpe", "vocab_size": 100}, "data.vocab_size=100.*256 or more"),
            ({"block_size": 0}, "data.block_size=0 must be at least 1"),
            ({"batch_size": 0}, "data.batch_size=0 must be at least 1"),
            ({"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
            ({"validation_fraction": 1.0}, "data.validation_fraction=1.0 must lie between"),
        ],
    )
    def test_it_is_refused_at_construction(self, make, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**arguments)

    def test_empty_places_are_refused(self, make, tmp_path: Path) -> None:
        (tmp_path / "nothing").mkdir()
        with pytest.raises(ValueError, match="no text file"):
            make(path=str(tmp_path / "nothing"))
        (tmp_path / "empty.txt").touch()
        with pytest.raises(ValueError, match="the file is empty"):
            make(path=str(tmp_path / "empty.txt"))

    @pytest.mark.parametrize("block_size", [5_000, 400])
    def test_a_text_shorter_than_a_block_is_refused(self, make, block_size: int) -> None:
        data = make(block_size=block_size)
        for check in (data.check, data.prepare_data, lambda: data.setup("fit")):
            with pytest.raises(ValueError, match=f"tokens, but a sample of data.block_size={block_size} needs"):
                check()

    def test_the_shortest_possible_text_is_taken(self, make, tmp_path: Path) -> None:
        path = tmp_path / "short.txt"
        path.write_bytes(b"x" * 32)
        data = make(path=str(path), validation_fraction=0.5)
        assert len(blocks(data, TRAIN)) == len(blocks(data, VALIDATION)) == 1

    def test_a_network_that_cannot_read_the_text_is_refused(self, make) -> None:
        data = make()
        data.check_network(vocab_size=300, block_size=16)
        with pytest.raises(ValueError, match="model.network.vocab_size=255 is less than the 256 tokens"):
            data.check_network(vocab_size=255, block_size=16)
        with pytest.raises(ValueError, match="data.block_size=16 is longer than model.network.block_size=8"):
            data.check_network(vocab_size=256, block_size=8)
