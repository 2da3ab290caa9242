"""Furniture: the models of Debian's package sweethome3d-furniture, in 15 classes by their names, as point clouds.

The models come as OBJ files in a handful of zip archives with a catalogue each. Those whose English name belongs to a
class are written as OFF files in ModelNet's layout, upright (z up) as the catalogue turns them, and read and sampled
by the same code as ModelNet40's.
"""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from filelock import FileLock
from joblib import Parallel, cpu_count, delayed
from rich.console import Console
from trimesh import Trimesh

from ..errors import RunError
from ..files import sync_folder, write_atomic
from ..progress import tracked
from .archives import UNREADABLE
from .base import data_folder, prepare_command
from .clouds import CloudData
from .meshes import CloudReport, prepare_clouds, read_report
from .off import OffError

NOTICE = (
    "furniture: models of Sweet Home 3D (www.sweethome3d.com) from Debian's package sweethome3d-furniture; whoever "
    "passes them on names their makers, which credits.txt lists"
)
PACKAGE = Path("/usr/share/sweethome3d/furniture")
CATALOGUE = "PluginFurnitureCatalog.properties"
#: Changes whenever the clouds of the same package would.
FORMAT = 1
NUM_POINTS = 10_000
TEST_SHARE = 0.2
#: Of the choice of the test part, which is the same for everyone.
TEST_SEED = 0

#: What the whole name of a model looks like, in small letters; the first class that fits has it.
CLASSES: dict[str, tuple[str, ...]] = {
    "appliance": (
        *("*oven", "*stove", "cooker", "cooktop", "induction cooker*", "*hood", "microwave", "toaster", "mixer"),
        *("*fridge", "refrigerator", "chest freezer", "*washing machine", "dryer machine", "blender", "water cooler"),
        *("boiler", "*water heater", "furnace", "radiator", "air conditioning*"),
        *("coffee machine", "coffee maker", "coffee brewer"),
    ),
    "bed": ("*bed", "crib"),
    "bench": ("*bench", "*bank", "*stool", "*ottoman", "puff"),  # seats without a back, mostly
    "cabinet": (
        *("*cabinet", "*bookcase", "*shelves", "wardrobe", "cupboard", "*locker", "dresser*", "*vanity", "chest"),
        *("bedside table", "tv stand"),
    ),
    "chair": ("*chair", "chair with*", "class seat"),
    "door": ("*door", "*door with*"),
    "lamp": (*("*lamp", "*light", "*lights", "*lantern", "*lamppost", "*lamp artwork", "fluorescent strip"),),
    "person": ("*male", "*boy", "*girl"),
    "plant": (
        *("*plant", "*tree", "*hedge", "bush", "flowers", "tulips", "orchids", "white lily", "peach blossom"),
        *("ficus", "bamboo", "cactus", "yucca", "spathiphyllum", "pine", "*pine under snow", "acacia"),
        *("copper beech", "cypress", "*maple", "poplar"),
    ),
    "sanitary": (
        *("*bath", "*bathtub", "*washbasin", "sink", "toilets unit", "urinal", "bidet", "small lavatory"),
        *("shower stall", "jacuzzi"),
    ),
    "sofa": ("*sofa*", "*couch"),
    "table": ("*table", "*desk", "table with*", "table on*"),
    "vehicle": (
        *("*truck", "*bus", "suv", "van", "concept sedan*", "smart car", "chevrolet*", "ford*", "seat leon"),
        *("peugeot*", "renault*", "vw*", "scooter", "motorbike", "yamaha*", "bike", "bicycle"),
    ),
    "vessel": (
        *("*bottle", "*glass", "*cup", "*mug", "bowl*", "vase", "teapot", "*jar", "flacon", "creamer", "pottery"),
    ),
    "window": ("*window", "*window *pane*", "*window with*"),
}
#: Of no class, although a pattern fits.
NOT_MEANT = ("wheelchair", "workbench", "abdominal bench")


def class_of(name: str) -> str | None:
    """The class of a model with that name; None where it belongs to none."""
    name = name.strip().lower()
    if name in NOT_MEANT:
        return None
    fitting = (label for label, patterns in CLASSES.items() if any(fnmatchcase(name, each) for each in patterns))
    return next(fitting, None)


class Model(NamedTuple):
    """An entry of a catalogue."""

    archive: str
    """The file name of the archive."""
    member: str
    """The OBJ file in it."""
    name: str
    label: str | None
    """Its class."""
    rotation: str
    """Rows of the matrix that puts it upright and facing forward, y up; empty for none."""
    creator: str
    licence: str
    stamp: str
    """Size and checksum of the OBJ file; empty where the archive lacks it."""

    @property
    def file(self) -> str:
        """A file name of its own, without folders or odd characters."""
        return re.sub(r"[^\w.-]+|/", "-", self.member.removesuffix(".obj"), flags=re.ASCII) + ".off"


@dataclass
class FurnitureReport:
    """What became of the models of the package."""

    clouds: CloudReport
    classes: dict[str, int]
    """Models of each class, those that could not be read included."""
    unmapped: dict[str, int]
    """Names that belong to no class, and how many models bear them."""
    licences: dict[str, str]
    """Of each catalogue."""

    def __str__(self) -> str:
        left = sum(self.unmapped.values())
        common = ", ".join(f"{name} ({count})" for name, count in Counter(self.unmapped).most_common(8))
        return "\n".join(
            [
                *(f"  {name}: {' '.join(licence.split())}" for name, licence in self.licences.items()),
                str(self.clouds),
                ", ".join(f"{count} {label}" for label, count in self.classes.items()),
                f"{left} of {left + sum(self.classes.values())} models belong to none of these classes"
                + (f": {common}{', ...' if len(self.unmapped) > 8 else ''}" if left else ""),
            ]
        )


def read_properties(content: bytes) -> dict[str, str]:
    r"""Reads a Java .properties file: Latin-1, \uXXXX escapes, comments, continued lines, "=", ":" or blank between."""
    found = {}
    lines = iter(re.split(r"\r\n|\r|\n", content.decode("latin-1")))
    for raw in lines:
        line = raw.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + next(lines, "").lstrip(" \t\f")
        match = re.match(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", line)
        assert match is not None  # both halves may be empty
        found[_unescaped(match[1])] = _unescaped(match[2])
    return found


def _unescaped(text: str) -> str:
    controls = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else controls.get(code, code)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", character, text)


def list_models(source: Path) -> tuple[list[Model], dict[str, str]]:
    """The models of all archives (.sh3f) below a folder, in the catalogues' order, and each catalogue's licence.

    Names are those of the plain catalogue, which is English; translations (..._de.properties) play no part.

    Raises:
        RunError: for a folder without archives, or an archive that is damaged or has no catalogue.
    """
    paths = sorted(source.rglob("*.sh3f")) if source.is_dir() else []
    if not paths:
        raise RunError(
            f"{source} {'holds no .sh3f archive' if source.is_dir() else 'is not there'}: install Debian's package "
            "with `apt-get install sweethome3d-furniture`, or give a folder with its .sh3f archives as --archive"
        )
    models, licences = [], {}
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:
                catalogue = read_properties(archive.read(CATALOGUE))
                stamps = {info.filename: f"{info.file_size} {info.CRC:08x}" for info in archive.infolist()}
        except KeyError:
            raise RunError(f"{path} has no {CATALOGUE}: it is no furniture library of Sweet Home 3D") from None
        except UNREADABLE as error:
            raise RunError(f"{path} is damaged: {error}; install sweethome3d-furniture anew") from error
        licence = catalogue.get("license", "no licence is stated")
        licences[catalogue.get("name", path.name)] = licence
        for key, member in catalogue.items():
            field, _, number = key.partition("#")
            if field != "model":
                continue
            member = member.lstrip("/")
            name = catalogue.get(f"name#{number}", "")
            rotation, creator = (catalogue.get(f"{field}#{number}", "") for field in ("modelRotation", "creator"))
            stamp = stamps.get(member, "")
            models.append(Model(path.name, member, name, class_of(name), rotation, creator, licence, stamp))
    return models, licences


def read_obj(content: bytes, name: str) -> Trimesh:
    """Reads vertices and faces of an OBJ file; polygons become fans of triangles, points and edges are left out.

    trimesh's reader loses faces behind tabs, fails at comments, and takes corners numbered 0 and vertices of two
    numbers, so this one is used.

    Args:
        content: the file.
        name: what messages call it.

    Raises:
        OffError: for a file without faces, with numbers that are not finite, or with faces whose corners do not exist;
            corners counted backwards (negative numbers) are not read.
    """
    text = re.sub(r"#[^\r\n]*", "", re.sub(r"\\\r?\n", " ", content.decode("latin-1")))
    text = text.replace("\r", "\n").replace("\t", " ")
    vertices = re.findall(r"^ *v +(\S+ +\S+ +\S+)", text, re.MULTILINE)
    announced = len(re.findall(r"^ *v(?= |$)", text, re.MULTILINE))
    if not announced:
        raise OffError(f"{name}: no OBJ file: it has no vertices")
    if len(vertices) != announced:
        raise OffError(f"{name}: {announced - len(vertices)} of {announced} vertices have less than three coordinates")
    faces = [re.sub(r"/\S*", "", face) for face in re.findall(r"^ *f +(\S.*)$", text, re.MULTILINE)]
    counts = np.array([len(face.split()) for face in faces], dtype=np.int64)
    try:
        points = np.array(" ".join(vertices).split(), dtype=np.float64).reshape(-1, 3)
        corners = np.array(" ".join(faces).split(), dtype=np.int64)
    except ValueError as error:
        raise OffError(f"{name}: a vertex or face holds what is no number: {error}") from None
    if not np.isfinite(points).all():
        raise OffError(f"{name}: a vertex has a coordinate that is not finite")
    wrong = corners[(corners < 1) | (corners > announced)]
    if len(wrong):
        raise OffError(f"{name}: a face has the corner {wrong[0]}, but vertices are numbered 1 to {announced}")
    triangles = [
        polygons[:, [0, i, i + 1]]
        for size in np.unique(counts)
        for polygons in [corners[np.repeat(counts == size, counts)].reshape(-1, size)]
        for i in range(1, size - 1)
    ]
    if not triangles:
        raise OffError(f"{name}: it has no faces")
    return Trimesh(points, np.concatenate(triangles) - 1, process=False)


def _upright(mesh: Trimesh, rotation: str, name: str) -> Trimesh:
    """Turned as the catalogue says, then from y up to z up."""
    try:
        matrix = np.array(rotation.split() or np.eye(3).ravel(), dtype=np.float64).reshape(3, 3)
    except ValueError:
        raise OffError(f"{name}: the catalogue's modelRotation is no matrix of nine numbers: {rotation!r}") from None
    x, y, z = (mesh.vertices @ matrix.T).T
    return Trimesh(np.stack([x, -z, y], axis=1), mesh.faces, process=False)


def _write_meshes(source: Path, models: Sequence[Model], targets: Sequence[Path]) -> dict[str, str]:
    """Writes OFF files of models of one archive where they are not there yet; why some could not, by target's name."""
    errors = {}
    with zipfile.ZipFile(next(source.rglob(models[0].archive))) as archive:
        for model, target in zip(models, targets, strict=True):
            if target.is_file():
                continue
            called = f"{model.archive}/{model.member}"
            try:
                mesh = _upright(read_obj(archive.read(model.member), called), model.rotation, called)
            except KeyError:
                errors[target.name] = f"{called}: the catalogue lists it, the archive does not have it"
            except OffError as error:
                errors[target.name] = str(error)
            except UNREADABLE as error:
                errors[target.name] = f"{called}: damaged: {error}"
            else:
                lines = ["OFF", f"{len(mesh.vertices)} {len(mesh.faces)} 0"]
                lines += [f"{x:.9g} {y:.9g} {z:.9g}" for x, y, z in mesh.vertices.tolist()]
                lines += [f"3 {a} {b} {c}" for a, b, c in mesh.faces.tolist()]
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, "\n".join(lines) + "\n")
    return errors


def families(models: Sequence[Model]) -> list[int]:
    """A number for each model, shared by those that may be variants of one design.

    These are models of one archive and class whose names, or the names of whose files, are the same but for numbers,
    sides, and whether they are open, closed or arched: "Sofa 2 seats" and "Sofa 3 seats", window_2x3.obj and
    window_4x5_arched.obj.
    """
    first: dict[tuple[Any, ...], int] = {}
    number = list(range(len(models)))
    for i, model in enumerate(models):
        for kind, name in (("name", model.name), ("file", Path(model.member).stem)):
            known = first.setdefault((model.archive, model.label, kind, _without_variant(name)), i)
            joined, into = number[i], number[known]
            number = [into if each == joined else each for each in number]
    return number


def _without_variant(name: str) -> str:
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    words = re.sub(r"[\W\d_]+", " ", words)
    return re.sub(r"\b(left|right|open|opened|closed|arched|regular)\b|\s+", "", words)


def hold_out(labels: Sequence[Any], family: Sequence[Any], share: float, seed: int) -> np.ndarray:
    """Sorted indices of about a share of every class; a family is never divided.

    Families come in random order and are taken where they fit the class's share. A class of one family stays whole.

    Args:
        labels: (n,) classes.
        family: (n,) families; each within one class.
        share: of the samples.
        seed: of the order.
    """
    held: list[int] = []
    for number, label in enumerate(sorted(set(labels))):
        rng = np.random.default_rng([seed, number])
        members: dict[Any, list[int]] = {}
        for i in range(len(labels)):
            if labels[i] == label:
                members.setdefault(family[i], []).append(i)
        groups = list(members.values())
        groups = [groups[place] for place in rng.permutation(len(groups))]
        wanted = round(share * sum(len(group) for group in groups))
        if wanted == 0 or len(groups) == 1:
            continue
        taken: list[int] = []
        for group in groups:
            if len(taken) + len(group) <= wanted:
                taken += group
        held += taken or sorted(groups, key=len)[0]
    return np.sort(np.asarray(held, dtype=np.int64))


def clouds_path(folder: str | Path) -> Path:
    """The prepared file in a data folder."""
    return data_folder(folder) / "furniture" / "clouds.h5"


def prepare(
    folder: Path,
    source: Path | None = None,
    *,
    jobs: int | None = None,
    num_points: int = NUM_POINTS,
    seed: int = 0,
    quiet: bool = False,
) -> FurnitureReport:
    """Samples the package's models to `folder`/furniture/clouds.h5; goes on where it was stopped.

    A fifth of each class is the test part, the same for everyone; variants of one design (see `families`) lie on one
    side.

    Args:
        folder: the folder of all data.
        source: a folder with the package's .sh3f archives; None takes the installed package.
        jobs: processes, None for one per core.
        num_points: points per mesh.
        seed: of the sampling.
        quiet: shows no progress.

    Raises:
        RunError: where the package is not installed, an archive is damaged, or no model belongs to a class.
    """
    source = source or PACKAGE
    target = clouds_path(folder)
    listed, licences = list_models(source)
    repeated = [file for file, count in Counter(model.file for model in listed).items() if count > 1]
    if repeated:
        raise RunError(f"{source} lists {repeated[0]} more than once ({len(repeated)} such models): is it there twice?")
    models = [model for model in listed if model.label]
    if not models:
        raise RunError(f"{source}: none of its {len(listed)} models belongs to a class")
    labels, family = [str(model.label) for model in models], families(models)
    test = set(hold_out(labels, family, TEST_SHARE, TEST_SEED).tolist())
    names = [f"{labels[i]}/{'test' if i in test else 'train'}/{model.file}" for i, model in enumerate(models)]
    facts = [FORMAT, num_points, seed, names, family, [[model.rotation, model.stamp] for model in models]]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        done = read_report(target)
        if done is not None and done[0] == key:
            report = done[1]
        else:
            report = _build(source, models, names, target, key, num_points, seed, jobs, quiet)
            _add(target, report, key, dict(zip(names, family, strict=True)))
        write_atomic(target.with_name("credits.txt"), _credits(models))
    return FurnitureReport(
        report,
        dict(sorted(Counter(labels).items())),
        dict(Counter(model.name for model in listed if not model.label)),
        licences,
    )


def _build(
    source: Path,
    models: Sequence[Model],
    names: Sequence[str],
    target: Path,
    key: str,
    num_points: int,
    seed: int,
    jobs: int | None,
    quiet: bool,
) -> CloudReport:
    """Meshes, then clouds, in a folder beside the target that the same models find again."""
    building = target.with_name(f".building-{key[:16]}")
    for stale in target.parent.glob(".building-*"):
        if stale != building:
            shutil.rmtree(stale)
    meshes = building / "meshes"
    meshes.mkdir(parents=True, exist_ok=True)
    shards = [
        rows[start : start + 8]
        for archive in sorted({model.archive for model in models})
        for rows in [[i for i, model in enumerate(models) if model.archive == archive]]
        for start in range(0, len(rows), 8)
    ]
    work: Iterable[dict[str, str]] = Parallel(n_jobs=min(jobs or cpu_count(), len(shards)), return_as="generator")(
        delayed(_write_meshes)(source, [models[i] for i in rows], [meshes / names[i] for i in rows]) for rows in shards
    )
    console = Console(stderr=True, quiet=quiet)
    errors: dict[str, str] = {}
    for found in tracked(work, f"reading {len(models):,} models", len(shards), console=console):
        errors |= found
    by_file = {Path(name).name: name for name in names}
    report = prepare_clouds(meshes, building / target.name, num_points, seed, jobs=jobs, quiet=quiet)
    return replace(
        report, path=str(target), errors={by_file[file]: why for file, why in sorted(errors.items())} | report.errors
    )


def _add(target: Path, report: CloudReport, key: str, family: Mapping[str, int]) -> None:
    """Moves the built file into its place, with what the clouds' own reader does not know."""
    building = target.with_name(f".building-{key[:16]}")
    with h5py.File(building / target.name, "r+") as file:
        file.attrs["key"] = key
        file.attrs["report"] = json.dumps(asdict(report))
        for split in ("train", "test"):
            file[split]["family"] = np.array([family[name.decode()] for name in file[split]["name"][()]], np.int64)
    with open(building / target.name, "rb+") as written:
        os.fsync(written.fileno())
    (building / target.name).replace(target)
    sync_folder(target.parent)
    shutil.rmtree(building)


def _credits(models: Sequence[Model]) -> str:
    return "".join(
        f"{model.archive}/{model.member}: {model.name}, by {model.creator or 'unknown'}; "
        f"{' '.join(model.licence.split())}\n"
        for model in models
    )


class Furniture(CloudData):
    """The furniture's clouds; run `python -m experiments.data.prepare furniture` first.

    Args:
        folder: the folder of all data.
        val_size: clouds of the training part to validate on, about: variants of one design stay on one side.
        split_seed: of their choice; not the run's seed.
        **options: those of `CloudData`.
    """

    name = "furniture"

    def __init__(self, folder: str, *, val_size: int, split_seed: int, **options: Any) -> None:
        path = clouds_path(folder)
        missing = (
            "install Debian's package with `apt-get install sweethome3d-furniture`, then run "
            f"`{prepare_command('furniture', folder)}`"
        )
        super().__init__(path, missing, val_size=val_size, split_seed=split_seed, **options)
        with h5py.File(path) as file:
            labels, family, names = (file["train"][name][()] for name in ("label", "family", "name"))
        val = hold_out(labels.tolist(), family.tolist(), val_size / len(labels), split_seed)
        for split, rows in (("val", val), ("train", np.setdiff1d(np.arange(len(labels)), val))):
            self.places[split] = ("train", rows)
            self._names[split] = names[rows]
