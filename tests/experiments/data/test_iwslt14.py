import importlib.util
import io
import json
import tarfile

import pytest

from experiments.data import binarize, iwslt14
from experiments.data.iwslt14 import paired_segments, train_pairs
from experiments.data.text import Dropped
from experiments.errors import RunError

TALKS = 50


def sides():
    """Training files of fifty pairs and lines around them, and five test files of two segments each."""
    head = ["<url>http://x</url>", "<keywords>a, b</keywords>", "<talkid>1</talkid>"]
    de = [*head, "<title>Der Titel: \xdcber uns</title>", "<description>Kurz gesagt</description>"]
    en = [*head, "<title>The title: About us</title>", "<description>In short</description>"]
    de += [f"Das ist der Satz Nummer {i}, und er ist kurz." for i in range(TALKS)]
    en += [f"This is sentence number {i}, and it's short." for i in range(TALKS)]
    files = {"train.tags.de-en.de": "\n".join(de) + "\n", "train.tags.de-en.en": "\n".join(en) + "\n"}
    for part in iwslt14.TEST_PARTS:
        for language, text in (("de", f"Gr\xfc\xdfe aus {part}"), ("en", f"It\u2019s {part}")):
            segments = f'<seg id="1"> {text} Eins </seg>\n<seg id="2">{text}\nZwei</seg>'
            files[f"IWSLT14.{part}.de-en.{language}.xml"] = f'<refset><doc docid="1">{segments}</doc>\n</refset>'
    return {name: content.encode() for name, content in files.items()}


def pack(path, files):
    with tarfile.open(path, "w:gz") as tarred:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"de-en/{name}")
            entry.size = len(content)
            tarred.addfile(entry, io.BytesIO(content))
    return path


def lines(path):
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


@pytest.fixture
def no_fairseq(monkeypatch):
    def missing(*_):
        raise binarize._NotThereError("not here")

    monkeypatch.setattr(binarize, "_preprocess", missing)


def prepare(folder, archive, **options):
    return iwslt14.prepare(folder, archive, **({"merges": 60, "jobs": 1, "quiet": True} | options))


def test_entities_of_the_test_files_are_read_and_a_shift_with_equal_numbers_is_said(tmp_path, no_fairseq):
    files = sides()
    name = "IWSLT14.TED.tst2010.de-en.{}.xml"
    plain = [f"{'lang ' * (7 * i % 23)}Q&amp;A &lt;{i}&gt; &quot;x&quot; &#39;y&#39;" for i in range(40)]
    shifted = [*plain[1:], "Ende"]
    for language, texts in (("de", plain), ("en", shifted)):
        segments = "\n".join(f'<seg id="{number}">{text}</seg>' for number, text in enumerate(texts, 1))
        files[name.format(language)] = f'<refset><doc docid="1">\n{segments}</doc></refset>'.encode()
    report = prepare(tmp_path, pack(tmp_path / "de-en.tgz", files))
    assert "Q&A <0> \"x\" 'y'" in lines(tmp_path / "iwslt14" / "extract" / "test.de")
    assert "IWSLT14.TED.tst2010: the lengths of the two sides do not go together in the 40 pairs from 5" in str(report)
    files[name.format("en")] = files[name.format("de")]
    assert "go together" not in str(prepare(tmp_path, pack(tmp_path / "other.tgz", files)))


def test_the_recipe_on_a_miniature(tmp_path, no_fairseq):
    report = prepare(tmp_path, pack(tmp_path / "de-en.tgz", sides()))
    # 50 pairs, a title and a description; pairs 23 and 46 validate.
    assert report.manifest["sizes"] == {"train": 50, "valid": 2, "test": 10}
    split = tmp_path / "iwslt14" / "split"
    assert lines(split / "train.de")[:2] == ["der titel : \xfcber uns", "kurz gesagt"]
    assert lines(split / "train.en")[2] == "this is sentence number 0 , and it &apos;s short ."
    assert lines(split / "valid.de") == [f"das ist der satz nummer {i} , und er ist kurz ." for i in (20, 43)]
    assert lines(split / "test.en")[2:4] == ["it &apos;s tedx.dev2012 eins", "it &apos;s tedx.dev2012 zwei"]
    assert lines(split / "test.de")[0] == "gr\xfc\xdfe aus ted.dev2010 eins"
    bpe = tmp_path / "iwslt14" / "bpe"
    for part in ("train", "valid", "test"):
        for language in ("de", "en"):
            whole = [line.replace("@@ ", "") for line in lines(bpe / f"{part}.{language}")]
            assert whole == lines(split / f"{part}.{language}")
    dropped = report.manifest["stages"][0]["facts"]["dropped"]
    assert dropped == {
        "metadata (url, talkid, keywords)": {"count": 3, "first": ["train:1", "train:2", "train:3"]},
    }
    assert "the whole archive gives about 160,239 train, 7,283 valid, 6,750 test pairs: this is another" in str(report)
    for record in report.manifest["stages"]:
        assert all({"lines", "sha256"} == set(facts) for file, facts in record["files"].items() if file != "codes")


def test_again_is_nothing_and_other_merges_make_all_anew(tmp_path, no_fairseq):
    archive = pack(tmp_path / "de-en.tgz", sides())
    first = prepare(tmp_path, archive)
    manifest = (tmp_path / "iwslt14" / "manifest.json").read_bytes()
    assert prepare(tmp_path, archive).made == []
    assert (tmp_path / "iwslt14" / "manifest.json").read_bytes() == manifest
    (tmp_path / "iwslt14" / "bpe" / "valid.de").write_bytes(b"half a li")
    assert prepare(tmp_path, archive).made == ["bpe"]
    assert (tmp_path / "iwslt14" / "manifest.json").read_bytes() == manifest
    assert prepare(tmp_path, archive, merges=30).made == first.made == ["extract", "tokens", "split", "bpe"]


def test_pairs_go_together_and_are_counted():
    long, wide = "w " * 176, "x" * 1001
    rows = [
        ("gut", "good"),
        ("a\u2028b\x85c", "d\re f"),
        ("", "alone"),
        ("allein", "\u2028"),
        (b"caf\xe9", "coffee"),
        ("<url>x</url>", "the other side has no address"),
        ("<title></title>", "<title>x</title>"),
    ]
    de, en = (
        b"\n".join(row[side] if isinstance(row[side], bytes) else row[side].encode() for row in rows) + b"\n"
        for side in (0, 1)
    )
    dropped = Dropped()
    assert train_pairs(de, en, dropped) == {"de": ["gut", "a b c"], "en": ["good", "d e f"]}
    assert dropped.facts() == {
        "empty de": {"count": 2, "first": ["train:3", "train:7"]},
        "empty en": {"count": 1, "first": ["train:4"]},
        "not UTF-8": {"count": 1, "first": ["train:5"]},
        "metadata on one side alone": {"count": 1, "first": ["train:6"]},
    }
    reasons = [
        ({"de": "a b c", "en": "a b"}, None),
        ({"de": "a b c d", "en": "a b"}, "lengths differ by more than 1.5"),
        ({"de": "a b", "en": "a b c d"}, "lengths differ by more than 1.5"),
        ({"de": long, "en": long}, "more than 175 tokens"),
        ({"de": long[2:], "en": long[2:]}, None),
        ({"de": wide, "en": "a"}, "a token of more than 1,000 characters"),
        ({"de": wide[1:], "en": "a"}, None),
        ({"de": "", "en": "a"}, "empty de"),
    ]
    assert [iwslt14._unfit(row) for row, _ in reasons] == [reason for _, reason in reasons]


def test_files_that_do_not_fit_name_the_first_line_that_shows_it():
    de = b"<url>x</url>\na\nb\n<url>y</url>\nc\n"
    with pytest.raises(RunError, match=r"has 5 lines and .*en 4: they do not belong together; line 3 is the first"):
        train_pairs(de, b"<url>x</url>\na\n<url>y</url>\nc\n", Dropped())
    with pytest.raises(RunError, match="line 3 is the first that shows it"):
        train_pairs(b"a\nb\nc\n", b"a\nb\n", Dropped())


@pytest.mark.parametrize(
    ("en", "message"),
    [
        ('<doc docid="1"><seg id="1">a</seg></doc>', r"the German side has 2 segments and the English 1"),
        (
            '<doc docid="1"><seg id="1">a</seg><seg id="3">b</seg></doc>',
            r"they differ first at \('1', '2'\) and \('1', ",
        ),
        (
            '<doc docid="2"><seg id="1">a</seg><seg id="2">b</seg></doc>',
            r"they differ first at \('1', '1'\) and \('2', ",
        ),
        ('<doc docid="1"><seg id="1">a</seg><seg id="2">b</doc>', r"1 of 2 segments do not end with </seg>"),
        ("caf\xe9".encode("latin-1"), r"IWSLT14\.TED\.x\.en:1 is not UTF-8"),
    ],
)
def test_test_files_that_do_not_fit_are_refused(en, message):
    de = b'<doc docid="1"><seg id="1">a</seg>\n<seg id="2">b</seg></doc>'
    with pytest.raises(RunError, match=message):
        paired_segments(de, en if isinstance(en, bytes) else en.encode(), "TED.x")


def test_an_archive_without_all_files_is_refused(tmp_path):
    files = sides()
    del files["IWSLT14.TED.tst2011.de-en.en.xml"]
    with pytest.raises(RunError, match=r"does not hold IWSLT14\.TED\.tst2011\.de-en\.en\.xml: it is not IWSLT'14"):
        prepare(tmp_path, pack(tmp_path / "de-en.tgz", files))


@pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")
def test_fairseq_preprocess_gives_the_layout_of_its_translation_task(tmp_path, monkeypatch):
    pack(tmp_path / "de-en.tgz", sides())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    report = prepare(iwslt14.Path("data"), iwslt14.Path("de-en.tgz"))
    binary = tmp_path / "data" / "iwslt14" / "data-bin"
    assert "left out, because" not in str(report)
    names = {
        f"{part}.de-en.{side}.{kind}"
        for part in ("train", "valid", "test")
        for side in ("de", "en")
        for kind in ("bin", "idx")
    }
    assert {path.name for path in binary.iterdir()} == names | {"dict.de.txt", "dict.en.txt", "preprocess.log"}
    assert binarize.count_sequences(binary / "valid.de-en.en.idx") == 2
    manifest = json.loads((tmp_path / "data" / "iwslt14" / "manifest.json").read_bytes())
    assert manifest["stages"][-1]["facts"]["lines"] == {
        f"{part}.{side}": count for part, count in (("train", 50), ("valid", 2), ("test", 10)) for side in ("de", "en")
    }
    unknown = manifest["stages"][-1]["facts"]["unknown"]
    pieces = (tmp_path / "data" / "iwslt14" / "bpe" / "test.de").read_text(encoding="utf-8").split()
    known = {line.split(" ")[0] for line in (binary / "dict.de.txt").read_text(encoding="utf-8").splitlines()}
    missing = sum(piece not in known for piece in pieces)
    assert missing
    assert unknown["test.de"] == {"tokens": len(pieces), "unknown": missing}
    assert unknown["train.de"]["unknown"] == 0
    rate = f"{missing / len(pieces):.2%} of {len(pieces)} tokens are not in the dictionary"
    assert f"test.de: {rate}" in str(report)
    # Where fairseq is gone later, what it made is still there.
    monkeypatch.setattr(binarize, "_preprocess", lambda *_: pytest.fail("made again"))
    assert prepare(iwslt14.Path("data"), iwslt14.Path("de-en.tgz")).made == []
