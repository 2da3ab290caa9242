import io
import os
import random
import struct
import subprocess
import tarfile
import threading
import zipfile

import pytest

from experiments.data import archives, binarize, segmentation
from experiments.data.archives import Package, fetch_package, fetch_url, read_members
from experiments.data.text import (
    Dropped,
    Made,
    Stages,
    check_lines,
    common,
    empty_side,
    keep,
    locked,
    odd_lengths,
    one_line,
    same_words,
    split_lines,
)
from experiments.errors import RunError

ODD = "a\u2028b\nc\x85d\ne\rf\n".encode()


def test_only_a_newline_ends_a_line():
    assert len(ODD.decode().splitlines()) == 6  # what other readers see
    lines = split_lines(ODD, "x")
    assert lines == ["a\u2028b", "c\x85d", "e\rf"]
    assert [one_line(line) for line in lines] == ["a b", "c d", "e f"]


def test_lines_that_are_not_utf8_keep_their_place():
    assert split_lines("caf\xe9\n".encode("latin-1") + "caf\xe9\n\nlast".encode(), "x") == [None, "caf\xe9", "", "last"]
    assert split_lines(b"\xef\xbb\xbfa\n", "x") == ["a"]
    assert split_lines(b"", "x") == []
    with pytest.raises(RunError, match=r"old\.txt is UTF-16: convert it to UTF-8"):
        split_lines("a\n".encode("utf-16"), "old.txt")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" a \t b ", "a b"),
        ("a\xa0b\u3000c", "a b c"),
        ("a\x1cb\x1dc\x0bd\x0ce", "a b c d e"),
        ("a \x00\x07 b", "a b"),
        ("\ufeffa\u2029", "a"),
        ("\r\n\u2028", ""),
        ("\xfcber\u200bmut", "\xfcber\u200bmut"),
    ],
)
def test_one_line_leaves_nothing_to_split_at(text, line):
    assert one_line(text) == line
    assert line.split() == [word for word in line.split(" ") if word]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A Great film!", "a great film"),
        ("caf\u00e9 au lait", "CAFE\u0301, au lait..."),
        ("the \ufb01nal cut", "The final cut"),
        ("\uff27\uff4f\uff4f\uff44 film", "good film"),
        ("Stra\u00dfe", "STRASSE"),
        ("so\u00adlid", "solid"),
        ("_really_ good", "really good"),
        ("don\u2019t go", "don't  go"),
    ],
)
def test_texts_that_differ_in_case_punctuation_and_unicode_form_are_the_same(one, other):
    assert one != other
    assert same_words(one) == same_words(other)


def test_other_words_are_another_text():
    assert len({same_words(text) for text in ("a film", "a film 2", "afilm", "...", "!!!", "\u4e2d")}) == 6
    columns = {"train": {"text": ["A b.", "c"]}, "valid": {"text": ["a b", "d"]}, "test": {"text": ["e"]}}
    assert common(columns, ["text"]) == {"valid": 1, "test": 0}


def test_sides_that_are_shifted_are_said():
    rng = random.Random(0)
    counts = [max(1, int(rng.lognormvariate(2.5, 0.7))) for _ in range(250)]
    columns = {
        "de": ["Wort " * n for n in counts],
        "en": ["a word" * int(n * rng.uniform(0.8, 1.2) + 1) for n in counts],
    }
    places = ["tst2010"] * 130 + ["tst2011"] * 120
    assert odd_lengths(columns, ("de", "en"), places) == []
    shifted = {"de": columns["de"][:130] + columns["de"][131:], "en": columns["en"][:249]}
    (remark,) = odd_lengths(shifted, ("de", "en"), places[:249])
    assert remark.startswith("tst2011: the lengths of the two sides do not go together in the 100 pairs from 131 on (")


def test_rows_go_as_a_whole_and_are_counted():
    dropped = Dropped()
    kept = keep({"de": ["a", "", "c", "d"], "en": ["1", "2", " ", "4"]}, empty_side, dropped, "train")
    assert kept == {"de": ["a", "d"], "en": ["1", "4"]}
    assert dropped.facts() == {
        "empty de": {"count": 1, "first": ["train:2"]},
        "empty en": {"count": 1, "first": ["train:3"]},
    }
    with pytest.raises(ValueError, match="shorter"):
        keep({"de": ["a"], "en": []}, empty_side, dropped, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ODD, r"b\.en:1: holds a line separator"),
        (b"a\nb\rc\nd\n", r"b\.en:2: holds a line separator"),
        (b"a\n\nc\n", r"b\.en:2: an empty line"),
        (b"a\nb  c\nd\n", r"b\.en:2: holds .*odd white space"),
        (b"a\nb\nc", r"b\.en: the last line does not end"),
        (b"a\nb\n", r"unequal numbers of lines: .*b\.de 3, .*b\.en 2\. Line 3 has no counterpart"),
        (b"a\nb\n\xff\n", r"b\.en:3: not UTF-8"),
    ],
)
def test_the_first_bad_line_is_named(tmp_path, content, message):
    (tmp_path / "b.de").write_bytes(b"x\ny\nz\n")
    (tmp_path / "b.en").write_bytes(content)
    with pytest.raises(RunError, match=message):
        check_lines([tmp_path / "b.de", tmp_path / "b.en"])
    (tmp_path / "b.en").write_bytes("1\n2\n\xfc 3\n".encode())
    assert check_lines([tmp_path / "b.de", tmp_path / "b.en"]) == 3


def made(*lines):
    return lambda: Made({"train": {"de": list(lines)}}, {"n": len(lines)}, {"codes": b"c"})


def unmade():
    raise AssertionError("made again")


def test_a_finished_stage_is_taken_and_a_damaged_one_made_anew(tmp_path):
    first = Stages(tmp_path, "key", quiet=True)
    assert first.run("words", made("a", "b"))["train"]["de"] == ["a", "b"]
    again = Stages(tmp_path, "key", quiet=True)
    assert again.run("words", unmade)["train"]["de"] == ["a", "b"]
    assert (first.made, again.made) == (["words"], [])
    assert first.records == again.records
    for damage in (
        lambda: (tmp_path / "words" / "train.de").write_text("a\n"),
        lambda: (tmp_path / "words" / "codes").unlink(),
        lambda: (tmp_path / "stages" / "words.json").write_text('{"key": '),
    ):
        damage()
        (tmp_path / "manifest.json").touch()
        with pytest.raises(AssertionError, match="made again"):
            Stages(tmp_path, "key", quiet=True).run("words", unmade)
        Stages(tmp_path, "key", quiet=True).run("words", made("a", "b"))
        assert not (tmp_path / "manifest.json").exists()


def test_other_options_make_all_anew(tmp_path):
    Stages(tmp_path, {"merges": 10}, quiet=True).run("words", made("a"))
    assert Stages(tmp_path, {"merges": 20}, quiet=True).run("words", made("b"))["train"]["de"] == ["b"]


def test_a_stage_that_died_half_way_is_not_there(tmp_path, monkeypatch):
    Stages(tmp_path, "old", quiet=True).run("words", made("a"))
    monkeypatch.setattr("experiments.data.text.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Stages(tmp_path, "new", quiet=True).run("words", made("b"))
    monkeypatch.undo()
    for key in ("new", "old"):
        with pytest.raises(AssertionError, match="made again"):
            Stages(tmp_path, key, quiet=True).run("words", unmade)


def test_a_stage_with_lines_that_tools_would_split_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"train\.de:2: holds a line separator"):
        Stages(tmp_path, "key", quiet=True).run("words", made("a", "b\u2028c"))
    with pytest.raises(RunError, match="unequal numbers"):
        Stages(tmp_path, "key", quiet=True).run("words", lambda: Made({"train": {"de": ["a"], "en": ["b", "c"]}}))


def test_the_files_of_a_tool_are_a_stage_too(tmp_path):
    def tool(folder):
        (folder / "x.bin").write_bytes(b"x")
        (folder / "preprocess.log").write_text("times")
        return {"lines": 1}

    stages = Stages(tmp_path, "key", quiet=True)
    stages.run_files("bin", tool)
    assert stages.records[0]["facts"] == {"lines": 1}
    assert list(stages.records[0]["files"]) == ["x.bin"]
    Stages(tmp_path, "key", quiet=True).run_files("bin", lambda _: unmade())
    with pytest.raises(AssertionError):
        Stages(tmp_path, "other", quiet=True).run_files("bin", lambda _: unmade())
    assert not list(tmp_path.glob(".bin*"))


def test_one_prepares_while_others_wait(tmp_path):
    times = []

    def prepare():
        with locked(tmp_path):
            Stages(tmp_path, "key", quiet=True).run("words", lambda: times.append(1) or made("a")())

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times == [1]


def tar_of(path, members, kind="w:gz"):
    with tarfile.open(path, kind) as tarred:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tarred.addfile(entry, io.BytesIO(content))
    return path


def test_folder_zip_and_tar_read_the_same(tmp_path):
    members = {"top/a.txt": b"1", "top/b/c.txt": b"2", "top/d.bin": b"3"}
    tar_of(tmp_path / "x.tgz", members)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped, tarfile.open(tmp_path / "x.tgz") as tarred:
        for name, content in members.items():
            zipped.writestr(name, content)
        tarred.extractall(tmp_path / "x", filter="data")
    for source in (tmp_path / "x.tgz", tmp_path / "x.zip", tmp_path / "x"):
        read = dict(read_members(source, lambda path: path.suffix == ".txt"))
        assert read == {"top/a.txt": b"1", "top/b/c.txt": b"2"}


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "..\\evil.txt"])
def test_archives_that_reach_outside_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as zipped:
        zipped.writestr(name, b"1")
    for source in (tar_of(tmp_path / "x.tgz", {name: b"1"}), tmp_path / "x.zip"):
        with pytest.raises(RunError, match="a path outside of the archive: it is not to be trusted"):
            list(read_members(source, lambda _: True))
    assert not list(tmp_path.parent.glob("evil*"))


def test_links_are_not_followed_and_huge_members_refused(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "x.tar", "w") as tarred:
        entry = tarfile.TarInfo("link.txt")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tarred.addfile(entry)
    assert list(read_members(tmp_path / "x.tar", lambda _: True)) == []
    monkeypatch.setattr(archives, "LARGEST_MEMBER", 3)
    with pytest.raises(RunError, match=r"a\.txt has more than .* not to be trusted"):
        list(read_members(tar_of(tmp_path / "y.tgz", {"a.txt": b"1234"}), lambda _: True))


def test_damaged_archives_are_one_sentence(tmp_path):
    whole = tar_of(tmp_path / "x.tgz", {"a.txt": os.urandom(5000)}).read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[:2000])
    (tmp_path / "text.tgz").write_text("<html>not found</html>")
    for name in ("cut.tgz", "text.tgz"):
        with pytest.raises(RunError, match=rf"{name} is damaged, or no folder, zip or tar") as refused:
            list(read_members(tmp_path / name, lambda _: True))
        assert "\n" not in str(refused.value)
    with pytest.raises(RunError, match=r"none\.tgz is not there"):
        list(read_members(tmp_path / "none.tgz", lambda _: True))


def test_a_package_is_known_by_its_hash_alone(tmp_path, monkeypatch):
    given = tmp_path / "elsewhere.whl"
    given.write_bytes(b"wheel")
    package = Package("p", "1.0", "p-1.0-py3-none-any.whl", archives.hash_file(given))
    cached = fetch_package(package, tmp_path / "raw", given)
    assert cached == tmp_path / "raw" / package.file
    monkeypatch.setattr(archives, "_pip_download", lambda *_: pytest.fail("fetched twice"))
    assert fetch_package(package, tmp_path / "raw") == cached
    cached.write_bytes(b"whee")
    with pytest.raises(RunError, match=r"damaged or another file than p-1\.0.* not .*\. Remove it and fetch it again"):
        fetch_package(package, tmp_path / "raw")
    assert fetch_package(package, tmp_path / "raw", given).read_bytes() == b"wheel"
    given.write_bytes(b"other")
    with pytest.raises(RunError, match=r"elsewhere\.whl is damaged or another file"):
        fetch_package(package, tmp_path / "raw", given)


@pytest.mark.parametrize("file", ["p-1.0.tar.gz", "p-1.0-py3-none-any.whl"])
def test_pip_is_asked_for_one_hashed_file(tmp_path, monkeypatch, file):
    package = Package("p", "1.0", file, archives.hashlib.sha256(b"content").hexdigest())

    def pip(command, **_):
        target = command[command.index("-d") + 1]
        with open(command[-1], encoding="utf-8") as wish:
            assert wish.read() == f"p==1.0 --hash=sha256:{package.sha256}\n"
        assert "--no-deps" in command
        assert "--require-hashes" in command
        assert ("--no-binary" in command) == file.endswith(".tar.gz")
        with open(os.path.join(target, file), "wb") as fetched:
            fetched.write(b"content")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(archives.subprocess, "run", pip)
    assert fetch_package(package, tmp_path / "raw").read_bytes() == b"content"
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [file]


def test_without_a_network_the_sentence_says_what_to_do(tmp_path, monkeypatch):
    package = Package("p", "1.0", "p-1.0-py3-none-any.whl", "0" * 64)
    failed = subprocess.CompletedProcess(
        [], 1, "", "WARNING: Retrying\nERROR: No matching distribution found for p\n\n"
    )
    monkeypatch.setattr(archives.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RunError, match=r"\(ERROR: No matching .*\)\. Without a network, .* --archive, or put it into"):
        fetch_package(package, tmp_path / "raw")

    def unreachable(*_):
        raise OSError("no route")

    monkeypatch.setattr(archives, "download_url", unreachable)
    with pytest.raises(
        RunError, match=r"x\.tgz could not be fetched \(.*no route.*\)\. .* as --archive, or put it into"
    ):
        fetch_url(["https://a/x.tgz", "https://b/x.tgz"], tmp_path / "raw")
    assert not list((tmp_path / "raw").iterdir())


def test_pieces_have_the_size_that_was_asked_for(tmp_path):
    words = [f"wort{a}{b} und noch viel mehr" for a in "abcdefgh" for b in "stuvwxyz"]
    # Longer than sentencepiece's own limit of 4,192 bytes; the only line with these letters.
    lines = [*words, "QQQJJJ " * 1000]
    rows = {"text": lines, "label": ["a"] * len(lines), "id": [str(i) for i in range(len(lines))]}
    test = {"text": ["wortas \u4e2d", "\u200b"], "label": ["a", "b"], "id": ["x", "y"]}
    stages = Stages(tmp_path, "key", quiet=True)
    result = segmentation.pieces({"train": rows, "test": test}, 80, False, stages)
    entries = [line.rsplit(" ", 1) for line in result.extra["dict.input0.txt"].decode().splitlines()]
    assert len(entries) + segmentation.FAIRSEQ_SYMBOLS == 80
    assert not {piece for piece, _ in entries} & {"<s>", "<pad>", "</s>", "<unk>"}
    assert any("QJ" in piece for piece, _ in entries)
    counted = " ".join(result.parts["train"]["input0"]).split(" ")
    assert {piece: counted.count(piece) for piece, _ in entries} == {piece: int(count) for piece, count in entries}
    assert result.parts["test"]["id"] == ["x"]  # a line of invisible characters has no pieces
    assert result.facts["dropped"] == {"empty input0": {"count": 1, "first": ["test:2"]}}
    assert result.facts["unknown_pieces"] == {"train": 0, "test": 1}
    again = segmentation.pieces({"train": rows, "test": test}, 80, False, stages)
    assert again.extra == result.extra
    with pytest.raises(RunError, match="a vocabulary of 16,000 pieces could not be made"):
        segmentation.train_pieces(words, 16_000, False)


def test_bpe_is_learned_on_training_text_alone(tmp_path):
    parts = {
        "train": {"de": ["niedrig niedriger", "niedrigst"], "en": ["low lower", "lowest"], "id": ["1", "2"]},
        "test": {"de": ["zzz zzz zzz zzz"], "en": ["lower zzz"], "id": ["3"]},
    }
    result = segmentation.joint_bpe(parts, ("de", "en"), 20, Stages(tmp_path, "key", quiet=True))
    codes = result.extra["codes"].decode().split("\n")
    assert codes[0] == "#version: 0.2"
    assert result.facts["merges"] == len([code for code in codes[1:] if code])
    assert not any("z" in code for code in codes)
    assert result.parts["test"]["de"] == [" ".join(["z@@ z@@ z"] * 4)]
    for part, columns in result.parts.items():
        for language, lines in columns.items():
            assert [line.replace("@@ ", "") for line in lines] == parts[part][language]


@pytest.mark.parametrize("word", ["abc", "a"])
def test_a_text_too_small_for_bpe_is_a_sentence(tmp_path, word):
    parts = {"train": {"de": [word], "en": ["z"]}}
    with pytest.raises(RunError, match="too small for BPE"):
        segmentation.joint_bpe(parts, ("de", "en"), 20, Stages(tmp_path, "key", quiet=True))


def test_binarising_without_fairseq_is_a_sentence_and_comes_later(tmp_path, monkeypatch):
    stages = Stages(tmp_path, "key", quiet=True)
    monkeypatch.setattr(binarize.importlib.util, "find_spec", lambda _: None)
    assert binarize.binarize_translation(stages, "de", "en") == (
        "data-bin was left out, because fairseq cannot be used (it is not installed): "
        "install it, give this command again"
    )
    assert not (tmp_path / "data-bin").exists()
    monkeypatch.undo()
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: No module named 'bitarray'\n")
    monkeypatch.setattr(binarize.subprocess, "run", lambda *_, **__: broken)
    assert "No module named 'bitarray'" in str(binarize.binarize_classification(stages))
    other = subprocess.CompletedProcess([], 1, "", "FileExistsError: dict.de.txt\n")
    monkeypatch.setattr(binarize.subprocess, "run", lambda *_, **__: other)
    with pytest.raises(RunError, match=r"fairseq-preprocess failed \(1\): FileExistsError"):
        binarize.binarize_translation(stages, "de", "en")


def test_a_binary_file_with_other_lines_than_its_text_is_refused(tmp_path, monkeypatch):
    (tmp_path / "bpe").mkdir()
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            (tmp_path / "bpe" / f"{split}.{language}").write_text("a\nb\n")

    def preprocess(folder, _):
        for split in ("train", "valid", "test"):
            for language in ("de", "en"):
                count = 3 if (split, language) == ("valid", "en") else 2
                head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 4, count)
                (folder / f"{split}.de-en.{language}.idx").write_bytes(head)

    monkeypatch.setattr(binarize, "_preprocess", preprocess)
    with pytest.raises(RunError, match=r"valid\.en has 2 lines, and fairseq-preprocess made 3 of them"):
        binarize.binarize_translation(Stages(tmp_path, "key", quiet=True), "de", "en")
    assert not (tmp_path / "data-bin").exists()
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(RunError, match="damaged or no index"):
        binarize.count_sequences(tmp_path / "x.idx")
