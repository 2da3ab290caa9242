"""Builds the native engine's libraries, one for each kind of processor; the rest of the package is in pyproject.toml.

They are plain shared libraries, without Python's or torch's headers, so one wheel serves every version of both. Where
there is no compiler the package is installed without them, and the portable engine does its work.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("plugins/sinkhorn_attention/engines/cpp")
#: Never -march=native: a cluster's home is shared by nodes with different processors.
LEVELS = {"x86_64": ("x86-64-v3", "x86-64-v4"), "aarch64": ("armv8-a",)}
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-s"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]


class BuildLibraries(build_ext):
    """Compiles each library by one call of a C++ compiler: CXX, or g++."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(self.extensions or [])

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        level = ext.name.rsplit("_", 1)[1]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [os.environ.get("CXX", "g++"), *FLAGS, *WARNINGS, f"-march={level}", *ext.sources, "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise CompileError(f"{command[0]} is not there") from error
        except subprocess.CalledProcessError as error:
            raise CompileError(error.stderr) from error


class Wheel(bdist_wheel):
    """A wheel for every Python 3, of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


levels = LEVELS.get(platform.machine(), ()) if sys.platform.startswith("linux") else ()
setup(
    ext_modules=[
        Extension(
            f"sinkhorn_attention.engines.libsinkhorn_{level}",
            [str(SOURCES / "native.cpp")],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            optional=True,
        )
        for level in levels
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
)
