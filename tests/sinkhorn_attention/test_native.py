"""The native engine beyond its numbers, which test_engines.py and test_properties.py hold: what it needs, threads,
memory, and how it is built and left aside."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention
from sinkhorn_attention.engines import AUTO, NATIVE, PORTABLE, native, native_library, portable
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.engines.native_library import SWITCH, Library
from sinkhorn_attention.engines.operator import define
from sinkhorn_attention.engines.problem import Problem

ROOT = Path(__file__).parents[2]
needs_library = pytest.mark.skipif(LIBRARY.load() is None, reason=f"no native engine: {LIBRARY.reason}")


def tokens(*lead: int, n: int = 40, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*lead, n, width, generator=generator, requires_grad=True) for _ in range(3)]


def step(problem: Problem, operator=NATIVE) -> list[torch.Tensor]:
    output = operator(problem)
    inputs = (problem.query, problem.key, problem.value)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def python(*lines: str, **environment: str) -> str:
    """What a Python of its own prints; fails with what it says."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins"), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------- what it needs


def test_the_layouts_of_a_call_are_the_same_on_both_sides() -> None:
    """A field that is added on one side alone would shift all that follow."""
    header = (Path(native.__file__).parent / "cpp" / "call.h").read_text()
    declared = header[header.index("struct Call {") : header.index("};", header.index("struct Call {"))]
    names = []
    for line in declared.splitlines()[1:]:
        code = line.split("//")[0].strip().rstrip(";")
        if code:
            names += [name.strip(" *").split("[")[0] for name in code.split(" ", 1)[1].split(",")]
    assert names == [name for name, _ in native.Call._fields_]


def test_turned_off_by_the_environment(monkeypatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    library = Library(native.disagreement)
    assert library.load() is None
    assert library.reason == f"{SWITCH}=0 turns it off"


@pytest.mark.parametrize(
    ("machine", "vectors", "reason"),
    [
        ("x86_64", "DEFAULT", "it needs AVX2 or ARMv8 (torch says DEFAULT on x86_64)"),
        ("ppc64le", "VSX", "it needs AVX2 or ARMv8 (torch says VSX on ppc64le)"),
        ("x86_64", "AVX512", "it was not built"),
        ("aarch64", "DEFAULT", "it was not built"),
    ],
)
def test_why_there_is_no_library(monkeypatch, tmp_path, machine: str, vectors: str, reason: str) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(native_library, "FOLDER", tmp_path)
    monkeypatch.setattr(native_library.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    library = Library(native.disagreement)
    assert library.load() is None
    assert reason in library.reason


def test_a_file_that_is_no_library_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not an object file")
    monkeypatch.setenv(SWITCH, str(tmp_path / "broken.so"))
    library = Library(native.disagreement)
    assert library.load() is None
    assert "broken.so" in library.reason


@needs_library
def test_a_library_that_disagrees_is_left_aside(monkeypatch) -> None:
    """With the reason; "auto" takes the portable engine then, and "native" is refused."""
    honest = native.Native._run

    def wrong(self, library, problem, results, d_output=None, gradients=None) -> None:
        honest(self, library, problem, results, d_output, gradients)
        if gradients is not None:
            gradients.of_inputs[1].mul_(1.001)

    with monkeypatch.context() as patch:
        patch.setattr(native.Native, "_run", wrong)
        library = Library(native.disagreement)
        assert library.load() is None
    assert library.reason.startswith("its check failed: the key of a small problem is off by 1.0e-03")
    monkeypatch.setattr(native, "LIBRARY", library)
    query, key, value = tokens(2)
    torch.testing.assert_close(
        sinkhorn_attention(query, key, value, 3), sinkhorn_attention(query, key, value, 3, backend="portable")
    )
    with pytest.raises(NotImplementedError, match=r"backend='native' needs its library \(its check failed"):
        sinkhorn_attention(query, key, value, 3, backend="native")


@pytest.mark.parametrize(
    ("lead", "n", "m", "width"), [((), 1, 1, 1), ((3,), 64, 33, 16), ((2, 3), 5, 7, 3), ((2, 2, 2), 70, 70, 32)]
)
@pytest.mark.parametrize("gradient", ["unrolled", "detached"])
def test_without_a_library_one_half_step_is_torchs_kernel(
    monkeypatch, make_problem, matches_reference, lead, n, m, width, gradient
) -> None:
    monkeypatch.setattr(LIBRARY, "load", lambda: None)
    for name in ("forward", "backward"):  # what would be called otherwise
        monkeypatch.setattr(portable.Portable, name, None)
    for std, scale in ((1, None), (5, -0.3)):
        call = make_problem(n, m, 1, lead=lead, width=width, value_width=width, std=std, scale=scale, gradient=gradient)
        for dtype in (torch.float32, torch.float64):
            matches_reference(call, ("auto", "streaming"), dtype)


@pytest.mark.parametrize("how", ["mask", "bias", "dropout", "value width", "half", "more half-steps", "strides", "NaN"])
def test_without_a_library_what_torchs_kernel_is_not_taken_for(monkeypatch, how: str) -> None:
    monkeypatch.setattr(LIBRARY, "load", lambda: None)
    query, key, value = (tensor.detach().requires_grad_() for tensor in tokens(2, 3))
    options: dict = {"n_iters": 3 if how == "more half-steps" else 1}
    if how == "mask":
        options["key_mask"] = torch.arange(40) < 30
        value = value.detach().masked_fill(~options["key_mask"][:, None], math.nan).requires_grad_()
    elif how == "bias":
        options["attn_bias"] = torch.eye(40)
    elif how == "dropout":
        options["dropout_p"] = 0.5
    elif how == "value width":
        value = value[..., :3].detach().requires_grad_()
    elif how == "half":
        query, key, value = (tensor.bfloat16().detach().requires_grad_() for tensor in (query, key, value))
    elif how == "strides":
        query, key, value = (tensor.mT.contiguous().mT.detach().requires_grad_() for tensor in (query, key, value))
    elif how == "NaN":
        query = query.detach().index_fill(0, torch.tensor(1), math.nan).requires_grad_()
    found = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)
        output = sinkhorn_attention(query, key, value, backend=backend, **options)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))])
    close = {"rtol": 2e-2, "atol": 1e-2} if how == "half" else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **close)
        assert one.dtype == other.dtype


@needs_library
def test_an_openmp_of_its_own_is_refused(monkeypatch) -> None:
    """Two pools of threads would take the cores from one another."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    library = Library(native.disagreement)
    assert library.load() is None
    assert "second OpenMP" in library.reason


@needs_library
def test_auto_takes_it_for_tokens_on_the_cpu(monkeypatch) -> None:
    query, key, value = tokens(2)
    problem = Problem(query, key, value, n_iters=3, scale=0.3)
    taken = []
    honest = native.Native._run
    monkeypatch.setattr(native.Native, "_run", lambda *given: (taken.append(1), honest(*given))[1])
    step(problem, AUTO)
    assert len(taken) == 2
    AUTO(Problem(scores=query @ key.mT, n_iters=3))
    assert len(taken) == 2, "given scores are the portable engine's"
    nine = [each.view(*(1,) * 8, *each.shape) for each in (query, key, value)]
    AUTO(Problem(*nine, n_iters=3))
    assert len(taken) == 2, "and more than eight leading dimensions"
    with pytest.raises(NotImplementedError, match="8 leading dimensions at most"):
        NATIVE(Problem(*nine, n_iters=3))


def test_what_is_here_is_printed() -> None:
    said = python("import sinkhorn_attention.__main__ as main", "main.main()")
    assert "portable   torch's own operations" in said
    assert said.splitlines()[-3].split() == ["tokens", "on", "the", "CPU", *native.describe_cpu_engine().split()]
    assert said.splitlines()[-2].startswith("  tokens on a CUDA device     ")
    off = python("import sinkhorn_attention.__main__ as main", "main.main()", **{SWITCH: "0"})
    assert f"native     not here: {SWITCH}=0 turns it off" in off


# ------------------------------------------------------------------------------------------------------------- threads


@needs_library
def test_any_number_of_threads_gives_the_same_up_to_rounding(monkeypatch) -> None:
    query, key, value = tokens(7, n=100)
    bias = torch.randn(100, 100, requires_grad=True)
    problem = Problem(query, key, value, attn_bias=bias, n_iters=4, scale=0.3)

    def run(threads: int) -> list[torch.Tensor]:
        monkeypatch.setattr(LIBRARY, "threads", lambda: threads)
        output = NATIVE(problem)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), (query, key, value, bias))]

    want = run(1)
    for threads in (2, 3, 5, 16):
        got = run(threads)
        for one, other, same in zip(got, want, run(threads), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
            assert one.equal(same), "the same number of threads gives the same bits"


@needs_library
def test_fewer_threads_than_asked_for_compute_all_the_same() -> None:
    """OpenMP grants fewer where a limit is set; a process that is forked has none of its parent's."""
    lines = (
        "import torch",
        "from sinkhorn_attention import sinkhorn_attention",
        "from sinkhorn_attention.engines.native import LIBRARY",
        "torch.manual_seed(0)",
        "q = torch.randn(5, 60, 8, requires_grad=True)",
        "LIBRARY.load()",
        "LIBRARY.threads = lambda: 4",
        "out = sinkhorn_attention(q, q, q, 5, backend='native')",
        "(grad,) = torch.autograd.grad(out.square().sum(), q)",
        "want = sinkhorn_attention(q, q, q, 5, backend='portable')",
        "(want_grad,) = torch.autograd.grad(want.square().sum(), q)",
        "torch.testing.assert_close(out, want)",
        "torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-4)",
        "print('equal')",
    )
    assert python(*lines, OMP_THREAD_LIMIT="2") == "equal"
    assert python(*lines, OMP_THREAD_LIMIT="1") == "equal"


@needs_library
def test_several_python_threads_call_at_once() -> None:
    inputs = tokens(4, n=64)
    problem = Problem(*inputs, n_iters=5, scale=0.3)
    want, failed = step(problem), []

    def work() -> None:
        for _ in range(20):
            got = step(problem)
            if not all(one.equal(other) for one, other in zip(got, want, strict=True)):
                failed.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


@needs_library
def test_forked_children_compute() -> None:
    """As a DataLoader's workers, and a plain fork after the parent has used its threads."""
    said = python(
        "import os, torch",
        "from sinkhorn_attention import sinkhorn_attention",
        "from sinkhorn_attention.engines.native import LIBRARY",
        "torch.set_num_threads(2)",
        "q = torch.ones(4, 50, 8) / 3",
        "want = sinkhorn_attention(q, q, q, 3, backend='native')",
        "child = os.fork()",
        "if child == 0:",
        "    assert LIBRARY.threads() == 1",
        "    same = sinkhorn_attention(q, q, q, 3, backend='native').equal(want)",
        "    os._exit(0 if same else 1)",
        "assert os.waitpid(child, 0)[1] == 0",
        "class Data(torch.utils.data.Dataset):",
        "    def __len__(self): return 2",
        "    def __getitem__(self, i): return sinkhorn_attention(q, q, q, 3, backend='native')",
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None):",
        "    assert batch.equal(want)",
        "print('equal')",
    )
    assert said == "equal"


# -------------------------------------------------------------------------------------------------------------- memory


@needs_library
@pytest.mark.parametrize("n_iters", [1, 5, 21])
def test_scratch_is_a_map_for_each_thread_or_none(n_iters: int, monkeypatch) -> None:
    asked = []
    honest = native.borrow

    def recorded(shape, dtype):
        asked.append(shape[0] * dtype.itemsize)
        return honest(shape, dtype=dtype)

    monkeypatch.setattr(native, "borrow", recorded)
    monkeypatch.setattr(LIBRARY, "threads", lambda: 2)
    inputs = tokens(8, n=512, width=32)
    step(Problem(*inputs, n_iters=n_iters, scale=0.1))
    kept = max(asked)
    monkeypatch.setattr(portable, "RECOMPUTE_BYTES", 0)
    asked.clear()
    step(Problem(*inputs, n_iters=n_iters, scale=0.1))
    vectors = 2 * (12 * 512 * 64 + 2 * 512 * n_iters + 3 * 48 * 1100) * 4
    assert max(asked) <= vectors, "nothing that grows with n * m"
    assert kept <= vectors + (2 * 512 * 600 * 4 if n_iters > 1 else 0), "a map for each thread"


@needs_library
def test_tokens_are_read_where_they_lie(monkeypatch) -> None:
    """Heads that a projection packed between the tokens, values shared by all heads, half precision: no copies."""
    packed = torch.randn(2, 30, 3, 4, 8).to(torch.bfloat16)
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    value = value[:, :1].expand(2, 4, 30, 8)
    got = NATIVE(Problem(query, key, value, n_iters=3, scale=0.3))
    want = PORTABLE(Problem(*(each.float() for each in (query, key, value)), n_iters=3, scale=0.3))
    torch.testing.assert_close(got, want)
    seen = []
    honest = native.operand
    monkeypatch.setattr(native, "operand", lambda *given, **more: (seen.append(given[0]), honest(*given, **more))[1])
    NATIVE(Problem(query, key, value, n_iters=3, scale=0.3))
    assert {each.data_ptr() for each in seen if each is not None} == {each.data_ptr() for each in (query, key, value)}


@needs_library
def test_negated_views_and_zeros_without_memory() -> None:
    """What torch holds with a sign to be changed, as z.conj().imag, or not at all, is not what lies at its address."""
    query, key, value = tokens(2)
    bias = torch.randn(40, 40)

    def run(query: torch.Tensor, bias: torch.Tensor, arriving: torch.Tensor) -> list[torch.Tensor]:
        output = NATIVE(Problem(query, key, value, attn_bias=bias, n_iters=3, scale=0.3))
        return [output.detach(), *torch.autograd.grad(output, (query, key, value), arriving)]

    def negated(tensor: torch.Tensor) -> torch.Tensor:
        view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        assert view.is_neg()
        return view

    arriving = torch.randn(2, 40, 8)
    want = run(query, bias, arriving)
    for given in ((torch._neg_view(-query), bias, arriving), (query, negated(bias), arriving)):
        for one, other in zip(run(*given), want, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(run(query, bias, torch._neg_view(-arriving)), want, strict=True):
        torch.testing.assert_close(one, other)
    assert all((each == 0).all() for each in run(query, bias, torch._efficientzerotensor(2, 40, 8))[1:])


# ------------------------------------------------------------------------------------------------ numbers at the edge


def against_the_definition(problem: Problem, tolerance: float = 1e-5) -> None:
    """Value and gradient, relative in norm."""
    leaves = [each.detach().requires_grad_() for each in (problem.query, problem.key, problem.value)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    got = step(replace(problem, query=leaves[0], key=leaves[1], value=leaves[2]))
    wide = replace(problem.in_dtype(torch.float64), query=exact[0], key=exact[1], value=exact[2])
    for one, other in zip(got, step(wide, define), strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_a_bias_that_overflows_times_log2_e(n_iters: int, dtype: torch.dtype) -> None:
    """The row that it stands in has its whole weight there; -max stands for no support as -inf does."""
    query, key, value = (each.to(dtype) for each in tokens(2))
    bias = torch.zeros(40, 40, dtype=dtype)
    bias[3, 4] = 0.9 * torch.finfo(dtype).max
    against_the_definition(Problem(query, key, value, attn_bias=bias, n_iters=n_iters, scale=0.3))


@needs_library
@pytest.mark.parametrize("n_iters", [1, 4])
@pytest.mark.parametrize(("of_query", "of_key", "scale"), [(1e-19, 1e18, 300.0), (1e-20, 1e-19, 1e39)])
def test_tokens_and_scales_out_of_proportion(of_query: float, of_key: float, scale: float, n_iters: int) -> None:
    """Squares below the smallest number are no bound of a score, and a scale may be too large for single precision."""
    query, key, value = tokens(2)
    against_the_definition(Problem(of_query * query.sign(), of_key * key, value, n_iters=n_iters, scale=scale), 1e-4)


@needs_library
@pytest.mark.parametrize("n_iters", [1, 3, 4])
def test_an_infinite_arriving_gradient_leaves_padding_alone(n_iters: int, monkeypatch) -> None:
    """As mixed precision brings it now and then: masked tokens have gradients of exactly 0, alone and in a team."""
    mask = torch.arange(40) % 3 > 0
    for threads in (1, 3):
        monkeypatch.setattr(LIBRARY, "threads", lambda threads=threads: threads)
        for bad in (math.inf, math.nan):
            leaves = tokens(2)
            output = NATIVE(Problem(*leaves, query_mask=mask, key_mask=mask, n_iters=n_iters, scale=0.3))
            arriving = torch.ones_like(output)
            arriving[0, 4, 2] = bad
            gradients = torch.autograd.grad(output, leaves, arriving)
            assert not all(each[0].isfinite().all() for each in gradients)
            assert all((each[:, ~mask] == 0).all() for each in gradients)
            assert all(each[1].isfinite().all() for each in gradients)


# ------------------------------------------------------------------------------------------------------------ building


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.mark.slow
@needs_compiler
@needs_library
def test_no_memory_error_and_no_undefined_behaviour(tmp_path) -> None:
    """The engine matrix and random problems with a library that watches every access and every operation."""
    library = tmp_path / "libsinkhorn_watched.so"
    flags = "-std=c++20 -O1 -g -march=x86-64-v3 -fno-math-errno -fopenmp -fPIC -shared -Wno-psabi"
    watched = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    source = Path(native.__file__).parent / "cpp" / "native.cpp"
    subprocess.run(["g++", *flags.split(), *watched.split(), str(source), "-o", str(library)], check=True)
    preload = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            "tests/sinkhorn_attention/test_engines.py::test_matches_the_reference",
            "tests/sinkhorn_attention/test_engines.py::test_shapes",
            *("-k", "native and not 7"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": preload.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "OMP_NUM_THREADS": "1",
            SWITCH: str(library),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_wheel_has_its_libraries_and_works_without_the_suite(tmp_path) -> None:
    """One wheel for every Python, without OpenMP in it; without a compiler a wheel without libraries."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "plugins", source / "plugins", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def build(folder: Path, **environment: str) -> list[str]:
        shutil.rmtree(source / "build", ignore_errors=True)
        subprocess.run(
            [*(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"), folder, source],
            env={**os.environ, **environment},
            check=True,
        )
        (wheel,) = folder.glob("*.whl")
        assert wheel.name.split("-")[2:4] == ["py3", "none"]
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
        assert {"sinkhorn_attention/py.typed", "timm_sinkhorn/py.typed"} <= set(names)
        return [name for name in names if name.endswith(".so") or ".so." in name]

    assert build(tmp_path / "without", CXX="no-such-compiler") == []
    if shutil.which("g++") is None:
        return
    built = build(tmp_path / "with")
    assert sorted(name.rsplit("_", 1)[1] for name in built) == ["x86-64-v3.so", "x86-64-v4.so"]
    # A clean environment that has torch and what torch needs alone: a venv that sees this one's packages through a path
    # file would see the suite, too, so torch is linked into it.
    venv.create(tmp_path / "clean", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(next((tmp_path / "with").glob("*.whl"))) as file:
        file.extractall(site)
    packages = Path(torch.__file__).parents[1]
    for name in ("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2",
                 "markupsafe", "fsspec", "filelock", "numpy", "nvidia", "triton"):  # fmt: skip
        if (packages / name).exists():
            (site / name).symlink_to(packages / name)
    first = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for words, says in ((("-m", "sinkhorn_attention"), "native     native x86-64-v"), (("-c", first), "")):
        said = subprocess.run(
            [tmp_path / "clean" / "bin" / "python", *words],
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", SWITCH)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 0, said.stderr[-2000:]
        assert says in said.stdout


def test_ctypes_fields_are_as_wide_as_the_header_says() -> None:
    assert ctypes.sizeof(native.Operand) == 8 * (2 + native.MAX_LEAD + 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "emulator"),
    [("g++", ()), ("aarch64-linux-gnu-g++", ("qemu-aarch64-static",))],
    ids=["of this machine", "ARM"],
)
def test_the_same_source_is_right_on_other_processors(tmp_path, compiler: str, emulator: tuple[str, ...]) -> None:
    """Values and gradients by a program without Python, emulated where it is not this machine's; 16-byte vectors."""
    for program in (compiler, *emulator):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    folder = Path(native.__file__).parent / "cpp"
    flags = ["-std=c++20", "-O2", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-static", "-Wno-psabi"]
    sources = [str(Path(__file__).parent / "native_driver.cpp"), str(folder / "native.cpp")]
    program = tmp_path / "driver"
    subprocess.run([compiler, *flags, f"-I{folder}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 80
