"""setuptools' build backend, for pip at the repository's root: works in this folder."""

import os
import pathlib

os.chdir(pathlib.Path(__file__).parent)

from setuptools.build_meta import *  # noqa: E402,F401,F403 - what a backend must have
