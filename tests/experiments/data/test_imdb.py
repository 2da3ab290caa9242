import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile

import pytest

from experiments.data import binarize, imdb
from experiments.data.imdb import clean_review
from experiments.data.text import same_words
from experiments.errors import RunError

ODD = "Gar nicht \xfcbel:\x85caf\xe9<br /><br />tr\xe8s\u2028bon.\r\nEnde\n"


def reviews():
    """Twelve reviews of each label and half, one of them odd; one text stands twice in the training half."""
    found = {}
    for half in ("train", "test"):
        for label, word in (("neg", "bad boring film"), ("pos", "good lovely film")):
            for number in range(12):
                text = f"{word} number {number} of {half}, {word} indeed"
                found[f"{half}/{label}/{number}_{3 if label == 'neg' else 9}.txt"] = text.encode()
    found["train/neg/10_3.txt"] = found["train/neg/11_3.txt"] = b"the very same"
    found["train/pos/2_9.txt"] = ODD.encode()
    return found


def pack(path, files):
    with tarfile.open(path, "w:gz") as tarred:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"aclImdb/{name}")
            entry.size = len(content)
            tarred.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def no_fairseq(monkeypatch):
    def missing(*_):
        raise binarize._NotThereError("not here")

    monkeypatch.setattr(binarize, "_preprocess", missing)


def prepare(folder, archive, **options):
    options = {"partial": True, "valid_size": 6, "vocabulary": 60, "quiet": True} | options
    return imdb.prepare(folder, archive, **options)


def lines(path):
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("good<br /><br />film", "good film"),
        ("a<br>b<BR/>c<br  />d", "a b c d"),
        (ODD, "Gar nicht \xfcbel: caf\xe9 tr\xe8s bon. Ende"),
        ("<b>x</b> < y", "<b>x</b> < y"),
    ],
)
def test_a_review_is_one_line_and_words_are_not_glued(text, line):
    assert clean_review(text) == line


def test_the_official_split_with_a_validation_split_from_train(tmp_path, no_fairseq):
    report = prepare(tmp_path, pack(tmp_path / "x.tgz", reviews()))
    assert report.manifest["sizes"] == {"train": 18, "valid": 6, "test": 24}
    split = tmp_path / "imdb" / "split"
    ids = {part: lines(split / f"{part}.id") for part in ("train", "valid", "test")}
    given = reviews()
    for part, names in ids.items():
        half = "test" if part == "test" else "train"
        texts = [clean_review(given[f"{half}/{name}"].decode()) for name in names]
        assert lines(split / f"{part}.text") == texts
        labels = ["negative" if name.startswith("neg") else "positive" for name in names]
        assert lines(split / f"{part}.label") == lines(tmp_path / "imdb" / "pieces" / f"{part}.label") == labels
        assert lines(tmp_path / "imdb" / "pieces" / f"{part}.id") == names
    assert sorted(ids["train"] + ids["valid"]) == sorted(name[6:] for name in given if name.startswith("train"))
    assert len(ids["test"]) == 24
    assert lines(split / "valid.label").count("negative") == 3
    # A repeated text is never validated on, because its twin is trained on.
    assert "the very same" not in lines(split / "valid.text")
    extract = report.manifest["stages"][0]["facts"]
    assert extract["repeated"] == {"train": 1, "test": 0}
    assert "data-bin was left out, because fairseq cannot be used (not here)" in str(report)
    assert "24 test" in str(report)


def test_no_review_is_validated_on_that_is_trained_or_tested_on_in_another_form(tmp_path, no_fairseq):
    files = reviews()
    twins = [f"Caf\u00e9 number {number}, GREAT fun!" for number in range(4)]
    others = [f"CAFE\u0301 number {number} -- great fun..." for number in range(4)]
    for number in range(4):
        files[f"train/pos/{number}_9.txt"] = twins[number].encode()
        files[f"train/pos/{number + 4}_9.txt"] = others[number].encode()
    files["test/pos/0_9.txt"] = files["train/neg/0_3.txt"].upper() + b"!"
    archive = pack(tmp_path / "x.tgz", files)
    for seed in range(5):  # the choice is one of chance
        (tmp_path / str(seed)).mkdir()
        report = prepare(tmp_path / str(seed), archive, seed=seed)
        split = tmp_path / str(seed) / "imdb" / "split"
        words = {part: set(map(same_words, lines(split / f"{part}.text"))) for part in ("train", "valid", "test")}
        assert not words["valid"] & (words["train"] | words["test"])
        assert report.manifest["stages"][0]["facts"]["repeated"] == {"train": 5, "test": 0}
        assert report.manifest["stages"][0]["facts"]["texts_in_both_halves"] == 1
        assert report.manifest["stages"][1]["facts"]["in_train_as_well"] == {"valid": 0, "test": 1}
        assert "1 reviews of the split test are trained on as well" in str(report)


def test_the_vocabulary_sees_training_text_alone(tmp_path, no_fairseq):
    files = {name: content + "\u4e2d".encode() * name.startswith("test") for name, content in reviews().items()}
    report = prepare(tmp_path, pack(tmp_path / "x.tgz", files))
    assert "\u4e2d" not in (tmp_path / "imdb" / "pieces" / "dict.input0.txt").read_bytes().decode()
    assert report.manifest["stages"][2]["facts"]["unknown_pieces"] == {"train": 0, "valid": 0, "test": 24}


def test_again_is_nothing_and_a_seed_is_another_split(tmp_path, no_fairseq):
    archive = pack(tmp_path / "x.tgz", reviews())
    first = prepare(tmp_path, archive)
    manifest = (tmp_path / "imdb" / "manifest.json").read_bytes()
    again = prepare(tmp_path, archive)
    assert (first.made, again.made) == (["extract", "split", "pieces"], [])
    assert (tmp_path / "imdb" / "manifest.json").read_bytes() == manifest
    assert json.loads(manifest)["split_hash"] == first.manifest["split_hash"]
    other = prepare(tmp_path, archive, seed=1)
    assert other.made == ["extract", "split", "pieces"]
    assert other.manifest["split_hash"] != first.manifest["split_hash"]
    assert prepare(tmp_path, archive).manifest == first.manifest


def test_what_cannot_be_read_is_counted_and_named(tmp_path, no_fairseq):
    files = reviews() | {
        "train/neg/20_1.txt": "caf\xe9".encode("latin-1"),
        "train/pos/21_9.txt": b"<br />\n",
        "test/pos/notes.txt": b"x",
        "train/unsup/1_0.txt": b"no label",
        "train/pos/._3_9.txt": b"a Mac's",
    }
    report = prepare(tmp_path, pack(tmp_path / "x.tgz", files))
    facts = report.manifest["stages"][0]["facts"]
    assert {reason: found["first"] for reason, found in facts["dropped"].items()} == {
        "not UTF-8": ["train/neg/20_1.txt"],
        "empty text": ["train/pos/21_9.txt"],
        "no name of the form <number>_<rating>.txt": ["test/pos/notes.txt"],
    }
    assert facts["files"] == {"test/neg": 12, "test/pos": 13, "train/neg": 13, "train/pos": 13}
    assert "1 left out: not UTF-8 (first: train/neg/20_1.txt)" in str(report)
    assert sum(report.manifest["sizes"].values()) == 48


def test_an_unpacked_folder_gives_the_same(tmp_path, no_fairseq):
    archive = pack(tmp_path / "x.tgz", reviews())
    with tarfile.open(archive) as tarred:
        tarred.extractall(tmp_path / "unpacked", filter="data")
    packed = prepare(tmp_path, archive)
    assert prepare(tmp_path, tmp_path / "unpacked").manifest["hashes"] == packed.manifest["hashes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial": False}, r"x\.tgz is damaged or another file than aclImdb_v1\.tar\.gz: .* --partial"),
        ({"valid_size": 100}, "imdb: cannot hold out"),
        ({"vocabulary": 16_000}, "a vocabulary of 16,000 pieces could not be made"),
    ],
)
def test_wrong_archives_and_options_are_one_sentence(tmp_path, no_fairseq, options, message):
    with pytest.raises(RunError, match=message):
        prepare(tmp_path, pack(tmp_path / "x.tgz", reviews()), **options)


def test_an_incomplete_or_repeated_half_is_refused(tmp_path, no_fairseq):
    pack(tmp_path / "x.tgz", reviews())
    with tarfile.open(tmp_path / "x.tgz") as tarred:
        tarred.extractall(tmp_path / "x", filter="data")
    with pytest.raises(RunError, match=r"is not complete: 12 in train/neg, .* instead of 12,500 each\. .* --partial"):
        prepare(tmp_path, tmp_path / "x", partial=False)
    half = {name: content for name, content in reviews().items() if name.startswith("train")}
    with pytest.raises(RunError, match=r"holds no reviews of the layout .* 0 in test/pos"):
        prepare(tmp_path, pack(tmp_path / "half.tgz", half))
    twice = reviews() | {"copy/train/neg/1_3.txt": b"x"}
    with pytest.raises(RunError, match=r"holds train/neg/1_3\.txt more than once"):
        prepare(tmp_path, pack(tmp_path / "twice.tgz", twice))
    with pytest.raises(RunError, match=r"none\.tgz is not there"):
        prepare(tmp_path, tmp_path / "none.tgz")


SCRIPT = """
import json, sys
from pathlib import Path
from experiments.data import imdb
folder = Path(sys.argv[1])
report = imdb.prepare(folder, folder / "x.tgz", partial=True, valid_size=6, vocabulary=60)
print(report)
binary = folder / "imdb" / "data-bin"
found = {}
from fairseq.data import Dictionary, data_utils
for column in ("input0", "label"):
    words = Dictionary.load(str(binary / column / "dict.txt"))
    found[column] = len(words)
    for split in ("train", "valid", "test"):
        rows = data_utils.load_indexed_dataset(str(binary / column / split), words)
        found[f"{split}.{column}"] = [words.string(row) for row in rows]
    if column == "label":
        found["first"] = words[words.nspecial]
(folder / "found.json").write_text(json.dumps(found), encoding="ascii")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")
def test_in_the_plainest_locale_fairseq_reads_what_was_written(tmp_path):
    pack(tmp_path / "x.tgz", reviews())
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
    environment = plain | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "48 reviews in" in done.stdout
    assert "left out" not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text(encoding="ascii"))
    assert found["input0"] == 60
    for split in ("train", "valid", "test"):
        # What training never saw is one unknown piece for fairseq.
        known = {line.split(" ")[0] for line in lines(tmp_path / "imdb" / "data-bin" / "input0" / "dict.txt")}
        pieces = [line.split(" ") for line in lines(tmp_path / "imdb" / "pieces" / f"{split}.input0")]
        expected = [" ".join(piece if piece in known else "<unk>" for piece in line) for line in pieces]
        assert found[f"{split}.input0"] == expected
        assert found[f"{split}.label"] == lines(tmp_path / "imdb" / "pieces" / f"{split}.label")
    whole = "".join(found["train.input0"] + found["valid.input0"]).replace(" ", "").replace("\u2581", " ")
    assert "Gar nicht \xfcbel: caf\xe9 tr\xe8s bon. Ende" in whole
    manifest = json.loads((tmp_path / "imdb" / "manifest.json").read_bytes())
    labels = manifest["stages"][-1]["facts"]["labels"]
    assert sorted(labels) == ["negative", "positive"]
    assert labels[found["first"]] == 0
