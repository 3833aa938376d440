"""Puts libmuond_client.so into the wheel: built by CMake from the repository that this folder lies
in, or taken from MUOND_LIBRARY where one was built before.

The library links Debian's gRPC and its kin, so the wheel is for machines that have them
(deploy/packages/build.txt). It is no extension module: one wheel serves every Python version.
"""

import os
import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70
    from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "libmuond_client.so"


def built_library():
    """The path of the library, built if need be."""
    if os.environ.get("MUOND_LIBRARY"):
        return pathlib.Path(os.environ["MUOND_LIBRARY"])
    if not (ROOT / "CMakePresets.json").exists():
        raise SystemExit(f"{ROOT}: no sources of muond: install from a clone of its repository, or "
                         f"set MUOND_LIBRARY to a {NAME}")
    cuda = os.environ.get("MUOND_CUDA", "AUTO")
    folder = ROOT / "build" / "python"
    subprocess.run(["cmake", "--preset", "release", "-B", folder, f"-DMUOND_CUDA={cuda}"],
                   cwd=ROOT, check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "muond_client_shared"], check=True)
    return folder / "lib" / NAME


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        target = pathlib.Path(self.build_lib) / "muond" / NAME
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built_library(), target)


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


def scratch():
    """Where setuptools works: in the repository's build folder, not beside the sources."""
    if not (ROOT / "CMakePresets.json").exists():
        return {}
    folder = ROOT / "build" / "python-wheel"
    folder.mkdir(parents=True, exist_ok=True)
    return {"build": {"build_base": str(folder)}, "egg_info": {"egg_base": str(folder)}}


setup(options=scratch(), cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
      distclass=PlatformDistribution)
