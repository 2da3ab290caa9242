import json
import zipfile

import pytest

from experiments.data import archives, binarize, home_assistant
from experiments.data.archives import Package
from experiments.data.home_assistant import family, split_of
from experiments.errors import RunError


def messages():
    """Forty families of two components with two messages each of their own, and one message that all have."""
    found = {}
    for number in range(40):
        for component in (f"maker{number}", f"maker{number}_pro"):
            common = ("Ger\xe4t ist bereits konfiguriert", "Device is already configured")
            own = (f"Das ist {component} von hier", f"This is {component} from here")
            other = (f"Bitte {component}\u2028neu\nstarten", f"Please restart {component} now")
            found[component] = {"config": {"abort": common, "step": {"user": own}}, "title": other}
    found["maker0"] |= {
        "short": ("Zwei Worte", "Two words"),
        "long": ("w " * 41, "w " * 41),
        "place": ("Hallo du {name} da", "Hello you {name} there"),
        "address": ("Gehe zu https://x.y jetzt", "Go to https://x.y now"),
        "same": ("Not translated at all", "Not translated at all"),
        "one": (None, "Only in this language"),
        "blank": (" \u2028 ", "Nothing on the other side"),
        "number": (1, 1),
        "half": ("Ein \ud800 halbes Zeichen", "Half a character here"),
    }
    return found


def side(node, index):
    if isinstance(node, tuple):
        return node[index]
    return {key: value for key, below in node.items() if (value := side(below, index)) is not None}


def pack(path, found):
    """The same messages give the same bytes: every entry has the date that ZipInfo starts with, not the clock's."""
    with zipfile.ZipFile(path, "w") as zipped:
        for component, node in found.items():
            for index, language in enumerate(("de", "en")):
                name = f"homeassistant/components/{component}/translations/{language}.json"
                zipped.writestr(zipfile.ZipInfo(name), json.dumps(side(node, index)))
        zipped.writestr(zipfile.ZipInfo("homeassistant/components/lonely/translations/en.json"), "{}")
        zipped.writestr(zipfile.ZipInfo("homeassistant/components/maker0/strings.json"), "no json")
    return Package("p", "1.0", path.name, archives.hash_file(path))


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    def missing(*_):
        raise binarize._NotThereError("not here")

    monkeypatch.setattr(binarize, "_preprocess", missing)

    def call(found=None, **options):
        package = pack(tmp_path / "p-1.0.whl", messages() if found is None else found)
        options = {"merges": 50, "jobs": 1, "quiet": True} | options
        return home_assistant.prepare(tmp_path, tmp_path / package.file, package=package, **options)

    return call


def lines(path):
    return path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")


def test_families_stay_together_and_no_sentence_is_in_two_splits(prepare, tmp_path):
    report = prepare()
    split = tmp_path / "ha_de_en" / "split"
    columns = {
        part: {column: lines(split / f"{part}.{column}") for column in ("de", "en", "id")}
        for part in ("train", "valid", "test")
    }
    for part, rows in columns.items():
        for de, en, place in zip(rows["de"], rows["en"], rows["id"], strict=True):
            component = place.split(":")[0]
            assert split_of(component, 0) == part
            if "Ger\xe4t" not in de:
                assert component in de
                assert component in en
    families = {part: {family(place.split(":")[0]) for place in rows["id"]} for part, rows in columns.items()}
    assert not families["train"] & families["valid"] | families["train"] & families["test"]
    assert not families["valid"] & families["test"]
    for language in ("de", "en"):
        texts = [text.casefold() for rows in columns.values() for text in rows[language]]
        assert len(texts) == len(set(texts))
    # The message that all have is trained on, once; each of 80 components has two of its own.
    assert columns["train"]["en"].count("Device is already configured") == 1
    assert sum(report.manifest["sizes"].values()) == 161
    assert "Bitte maker1 neu starten" in [de for rows in columns.values() for de in rows["de"]]
    facts = report.manifest["stages"][1]["facts"]["dropped"]
    assert sum(found["count"] for found in facts.values()) == 79


def test_what_is_left_out_is_counted_with_its_place(prepare):
    facts = prepare().manifest["stages"][0]["facts"]
    assert {reason: (found["count"], found["first"][0]) for reason, found in facts["dropped"].items()} == {
        "fewer than 3 words": (1, "maker0:short"),
        "more than 40 words": (1, "maker0:long"),
        "a placeholder or an address": (2, "maker0:place"),
        "not translated": (1, "maker0:same"),
        "in one language alone": (1, "maker0:one"),
        "empty de": (1, "maker0:blank"),
        "no text": (1, "maker0:number"),
        "not UTF-8": (1, "maker0:half"),
    }
    assert facts["read"] == {"components": 80, "components_of_one_language": 1, "keys": 249}


def test_the_same_seed_gives_the_same_files(prepare, tmp_path):
    first = prepare()
    assert prepare().made == []
    manifest = (tmp_path / "ha_de_en" / "manifest.json").read_bytes()
    for record in (tmp_path / "ha_de_en" / "stages").iterdir():
        record.unlink()
    assert prepare().made == first.made == ["extract", "split", "tokens", "bpe"]
    assert (tmp_path / "ha_de_en" / "manifest.json").read_bytes() == manifest
    assert prepare(seed=1).manifest["split_hash"] != first.manifest["split_hash"]


def test_a_component_is_in_its_split_whatever_others_there_are(prepare, tmp_path):
    prepare()
    place = tmp_path / "ha_de_en" / "split" / "valid.id"
    before = [line for line in lines(place) if not line.startswith("maker0")]
    found = messages()
    del found["maker0"], found["maker0_pro"]
    prepare(found)
    assert [line for line in lines(place) if ":config.abort" not in line] == [
        line for line in before if ":config.abort" not in line
    ]


def test_damage_is_one_sentence(prepare, tmp_path):
    with pytest.raises(RunError, match="ha_de_en: no pair is left for the split"):
        prepare({"maker1": {"a": ("Ein kurzer Satz", "A short sentence")}})
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as zipped:
        for language in ("de", "en"):
            zipped.writestr(f"components/a/translations/{language}.json", "{")
    package = Package("p", "1.0", "x.whl", archives.hash_file(tmp_path / "x.whl"))
    with pytest.raises(RunError, match=r"a/de\.json holds no messages in JSON"):
        home_assistant.prepare(tmp_path, tmp_path / "x.whl", package=package, quiet=True)
