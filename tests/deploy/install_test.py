#!/usr/bin/env python3
"""What `cmake --install` and cpack make of a build: that a project of somebody else finds the
client by CMake and by pkg-config, builds the shipped example and trains with it, and that the
packages hold what they should. Nothing of this tree is built here but what ctest needs anyway."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from muond_process import ProcessTest, clean_environment  # pylint: disable=wrong-import-position

BUILD = pathlib.Path(os.environ["MUOND_BUILD_DIR"])
EXAMPLE = "share/muond/examples/remote"


class InstallTest(ProcessTest):

    def command(self, *words, where=None, **environment):
        done = subprocess.run([str(word) for word in words], cwd=where, capture_output=True,
                              text=True, check=False, timeout=300,
                              env=clean_environment(**environment))
        self.assertEqual(done.returncode, 0, f"{words}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def setUp(self):
        # The same place each time: ccache then knows what it has compiled.
        self.place = BUILD / "install-test"
        shutil.rmtree(self.place, ignore_errors=True)
        self.addCleanup(shutil.rmtree, self.place, True)

    def install(self, component):
        prefix = self.place / "prefix"
        self.command("cmake", "--install", BUILD, "--prefix", prefix, "--component", component)
        return prefix

    def trains(self, example):
        """The example's loss falls."""
        daemon = self.start_daemon("--backend", "reference")
        said = self.command(example, "run", MUOND_ENDPOINT=daemon.unix)
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
        self.assertEqual(len(losses), 4, said)
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertLess(losses[-1], losses[0] / 2)

    def test_a_second_project_finds_the_client(self):
        prefix = self.install("dev")
        project = self.place / "project"
        shutil.copytree(prefix / EXAMPLE, project)
        self.command("cmake", "-G", "Ninja", "-B", project / "build", "-S", project,
                     f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0",
                     "-DCMAKE_CXX_COMPILER_LAUNCHER=" + (shutil.which("ccache") or ""))
        self.command("cmake", "--build", project / "build")
        self.trains(project / "build/muond-example-remote")
        for path in prefix.rglob("*"):
            if path.suffix in (".cmake", ".pc", ".h"):
                text = path.read_text()
                self.assertNotIn(str(ROOT), text, f"{path}: must not lead back into the tree")

    def test_pkg_config_names_all_that_it_needs(self):
        prefix = self.install("dev")
        library = next(prefix.glob("lib*/**/pkgconfig"))
        project = self.place / "project"
        shutil.copytree(prefix / EXAMPLE, project)
        ccache = "ccache " if shutil.which("ccache") else ""
        self.command("make", "-C", project, f"CXX={ccache}g++ -O0", PKG_CONFIG_PATH=str(library))
        self.trains(project / "muond-example-remote")

    def test_another_prefix_is_found_where_it_was_moved(self):
        prefix = self.install("dev")
        moved = prefix.rename(self.place / "moved")
        pkgconfig = next(moved.glob("lib*/**/pkgconfig"))
        said = self.command("pkg-config", "--cflags", "muond", PKG_CONFIG_PATH=str(pkgconfig))
        include = next(word[2:] for word in said.split() if word.startswith("-I"))
        self.assertTrue((pathlib.Path(include) / "client/cpp/session.h").exists(), said)

    def test_the_daemon_runs_from_its_prefix(self):
        prefix = self.install("daemon")
        for name in ("bin/muond", "bin/muonctl", "bin/muond-bench", "etc/muond/muond.conf",
                     "lib/systemd/system/muond@.service", "lib/muond/start-instance",
                     "lib/sysusers.d/muond.conf", "lib/tmpfiles.d/muond.conf",
                     "share/muond/tls/make-ca", "share/muond/slurm/train.sbatch",
                     "share/doc/muond/deploy.md"):
            self.assertTrue((prefix / name).exists(), name)
        said = self.command(prefix / "bin/muond", "--config", prefix / "etc/muond/muond.conf",
                            "--print-config")
        self.assertIn("muond.conf:", said)

    def packages(self):
        """The packages' files by their names."""
        self.command("cpack", "-G", "DEB", "-B", self.directory, where=BUILD)
        packages = {path.name.split("_")[0]: path for path in self.directory.glob("*.deb")}
        self.assertEqual(set(packages), {"muond", "libmuond-dev"})
        return packages

    def test_packages_keep_to_debians_policy(self):
        """No error and no warning of lintian but those that the package gives a reason for."""
        for tool in ("lintian", "help2man"):
            if not shutil.which(tool):
                self.skipTest(f"SKIPPED: {tool} is not installed")
        packages = self.packages()
        done = subprocess.run(
            ["lintian", "--allow-root", "--profile", "debian", "--tag-display-limit", "0",
             "--display-info", *packages.values()],
            capture_output=True, text=True, check=False, timeout=300,
            env=clean_environment(LC_ALL="C.UTF-8"))
        self.assertRegex(done.stdout, "(?m)^I: muond: ", f"it judged nothing: {done.stderr}")
        faults = re.findall(r"(?m)^(?:[EW]: .*|.*(?:unused|mismatched)-override.*)$", done.stdout)
        self.assertEqual(faults, [])
        for name, path in packages.items():
            self.command("dpkg-deb", "--extract", path, self.directory / name)
            overrides = self.directory / name / "usr/share/lintian/overrides" / name
            before = ""
            for line in overrides.read_text().splitlines():
                self.assertTrue(before or line.startswith("#"), f"{overrides}: no reason: {line}")
                before = line
            manuals = {page.name for page in (self.directory / name).rglob("man1/*")}
            self.assertEqual(manuals, {"muond.1.gz", "muonctl.1.gz", "muond-bench.1.gz"}
                             if name == "muond" else set())

    def test_packages(self):
        packages = self.packages()
        field = lambda name, what: self.command("dpkg-deb", "--field", packages[name], what)
        self.assertIn("libgrpc++1.51", field("muond", "Depends"))
        self.assertIn("libgrpc++-dev", field("libmuond-dev", "Depends"))
        control = self.directory / "control"
        self.command("dpkg-deb", "--control", packages["muond"], control)
        self.assertEqual((control / "conffiles").read_text(), "/etc/muond/muond.conf\n")
        for script in ("postinst", "prerm"):
            self.assertTrue(os.access(control / script, os.X_OK), script)
        root = self.directory / "root"
        for path in packages.values():
            self.command("dpkg-deb", "--extract", path, root)
        for name in ("etc/muond/muond.conf", "usr/lib/systemd/system/muond@.service",
                     "usr/lib/sysusers.d/muond.conf", "usr/include/muond/client/cpp/session.h",
                     "usr/share/doc/muond/copyright"):
            self.assertTrue((root / name).exists(), name)
        self.assertFalse((root / "usr/etc").exists())
        self.assertFalse(list(root.rglob("*_test*")))
        self.assertRegex(self.command(root / "usr/bin/muond", "--version"), r"^muond \d")


if __name__ == "__main__":
    if os.environ.get("MUOND_SANITIZE"):
        print("SKIPPED: a sanitizer's libraries are not for other projects; the preset dev runs "
              "this", file=sys.stderr)
        sys.exit(77)
    unittest.main()
