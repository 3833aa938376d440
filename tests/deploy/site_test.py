#!/usr/bin/env python3
"""The documents as a site, built by mkdocs without a warning: no page is lost, no link is dead."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class SiteTest(unittest.TestCase):

    def build(self, config, where):
        return subprocess.run(["mkdocs", "build", "--strict", "--quiet", "--config-file", config,
                               "--site-dir", where], capture_output=True, text=True, check=False,
                              timeout=120)

    def test_it_builds_strictly_and_has_every_page(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.build(ROOT / "mkdocs.yml", folder)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            navigation = (ROOT / "mkdocs.yml").read_text()
            for page in (ROOT / "docs").glob("*.md"):
                self.assertTrue((pathlib.Path(folder) / f"{page.stem}.html").exists(), page)
                self.assertIn(f": {page.name}\n", navigation, "every page is in the navigation")

    def test_a_link_to_nowhere_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            tree = pathlib.Path(folder) / "tree"
            shutil.copytree(ROOT / "docs", tree / "docs")
            shutil.copytree(ROOT / "deploy/site", tree / "deploy/site")
            shutil.copy(ROOT / "mkdocs.yml", tree)
            with open(tree / "docs/index.md", "a", encoding="utf-8") as page:
                page.write("\n[nothing](no_such_page.md)\n")
            done = self.build(tree / "mkdocs.yml", pathlib.Path(folder) / "site")
            self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    if os.environ.get("MUOND_SANITIZE"):
        print("SKIPPED: no memory of ours is used here; the preset dev runs this", file=sys.stderr)
        sys.exit(77)
    if not shutil.which("mkdocs"):
        print("SKIPPED: mkdocs is not installed (deploy/install-packages --test)", file=sys.stderr)
        sys.exit(77)
    unittest.main()
