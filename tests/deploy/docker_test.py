#!/usr/bin/env python3
"""The Dockerfile by hadolint, and its last stage built for real by buildah where this machine has a
root file system to start from ($MUOND_DOCKER_BASE, see tests/deploy/make-base); with
MUOND_TEST_LONG all stages of the CPU image, compiled inside. The compose file and what it mounts,
read and held against the tree."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from muond_process import ProcessTest  # pylint: disable=wrong-import-position

DOCKER = ROOT / "deploy/docker"
HADOLINT = ROOT / "build/deploy-venv/bin/hadolint"
SCHEMA = ROOT / "build/deploy-venv/bin/check-jsonschema"
BASE = pathlib.Path(os.environ.get("MUOND_DOCKER_BASE", ROOT / "build/docker-base"))
BUILD = pathlib.Path(os.environ["MUOND_BUILD_DIR"])
LONG = bool(os.environ.get("MUOND_TEST_LONG"))


def why_no_build():
    """Why the image can't be built here; None if it can."""
    if not shutil.which("buildah") or os.geteuid() != 0:
        return "buildah is not installed, or this is not root"
    if not (BASE / "etc/debian_version").exists():
        return f"no base in {BASE}: tests/deploy/make-base makes one"
    return None


class FilesTest(unittest.TestCase):

    def test_the_dockerfile_has_no_known_fault(self):
        if not HADOLINT.exists():
            self.skipTest(f"SKIPPED: {HADOLINT} is missing: tests/deploy/make-venv makes it")
        done = subprocess.run([HADOLINT, DOCKER / "Dockerfile"], capture_output=True, text=True,
                              check=False, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_compose_keeps_to_the_specifications_schema(self):
        if not SCHEMA.exists():
            self.skipTest(f"SKIPPED: {SCHEMA} is missing: tests/deploy/make-venv makes it")
        done = subprocess.run([SCHEMA, "--builtin-schema", "vendor.compose-spec",
                               DOCKER / "compose.yaml"], capture_output=True, text=True,
                              check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_compose_mounts_what_is_there(self):
        try:
            import yaml  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("SKIPPED: python3-yaml is not installed")
        compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
        services = compose["services"]
        self.assertEqual(set(services), {"muond", "prometheus", "grafana"})
        for service in services.values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue((DOCKER / source).exists(), source)
                else:
                    self.assertIn(source, compose["volumes"])
        self.assertTrue((DOCKER / services["muond"]["build"]["context"]
                         / services["muond"]["build"]["dockerfile"]).exists())
        prometheus = yaml.safe_load((DOCKER / "provisioning/prometheus.yaml").read_text())
        port = services["muond"]["environment"]["MUOND_METRICS_ADDRESS"].split(":")[1]
        self.assertEqual(prometheus["scrape_configs"][0]["static_configs"][0]["targets"],
                         [f"muond:{port}"])
        # Where Prometheus and Grafana look is where the tree's rules and dashboards are mounted.
        rules, where = compose["x-rules"].split(":")[:2]
        pattern = prometheus["rule_files"][0]
        self.assertEqual(os.path.dirname(pattern), where)
        self.assertTrue(list((DOCKER / rules).glob(os.path.basename(pattern))))
        dashboards, where = compose["x-dashboards"].split(":")[:2]
        self.assertTrue(list((DOCKER / dashboards).glob("*.json")))
        provider = yaml.safe_load(
            (DOCKER / dashboards / "provisioning/dashboards/muond.yaml").read_text())
        self.assertEqual(provider["providers"][0]["options"]["path"], where)
        source = yaml.safe_load((DOCKER / "provisioning/datasources.yaml").read_text())
        self.assertEqual(source["datasources"][0]["type"], "prometheus")

    def test_the_last_stage_has_the_libraries_of_the_programs(self):
        """What dpkg-shlibdeps would find, by the linker."""
        listed = set(re.findall(r"(?m)^([a-z0-9+.-]+)",
                                (ROOT / "deploy/packages/runtime.txt").read_text()))
        linked = subprocess.run(["readelf", "-d", BUILD / "bin/muond"], capture_output=True,
                                text=True, check=True).stdout
        for library in re.findall(r"NEEDED.*\[(.+?)\]", linked):
            if re.match(r"lib(c|m|stdc\+\+|gcc_s|pthread)\.so|ld-linux", library):
                continue
            path = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True,
                                  check=True).stdout
            found = re.search(rf"(?m)^\s{re.escape(library)} .*=> (\S+)", path)[1]
            owner = subprocess.run(["dpkg", "-S", os.path.realpath(found)], capture_output=True,
                                   text=True, check=True).stdout.split(":")[0]
            with self.subTest(library):
                self.assertIn(owner, listed)


class ImageTest(ProcessTest):

    def setUp(self):
        if why_no_build():
            self.skipTest(f"SKIPPED: {why_no_build()}")
        self.storage = ["--root", str(self.directory / "storage"), "--runroot",
                        str(self.directory / "run"), "--storage-driver", "vfs"]
        self.addCleanup(lambda: subprocess.run(
            ["buildah", *self.storage, "rm", "--all"], capture_output=True, check=False))

    def buildah(self, *words, timeout=500):
        done = subprocess.run(["buildah", *self.storage, *map(str, words)], capture_output=True,
                              text=True, check=False, timeout=timeout)
        self.assertEqual(done.returncode, 0, f"{words}\n{done.stdout}\n{done.stderr}")
        return done.stdout.strip()

    def image(self, name, folder):
        """An image of a folder."""
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, folder, "/")
        self.buildah("commit", "--quiet", container, name)
        self.buildah("rm", container)

    def test_the_last_stage_is_built_and_serves(self):
        programs = self.directory / "programs"
        subprocess.run(["cmake", "--install", BUILD, "--prefix", "/usr", "--component", "daemon",
                        "--strip"], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "DESTDIR": str(programs / "out")})
        self.image("programs", programs)
        self.build("localhost/programs")
        self.serves()

    def test_all_stages_are_built_and_serve(self):
        """The programs are compiled inside, with this machine's compiler cache if it has one."""
        if not LONG:
            self.skipTest("*** ONLY WITH MUOND_TEST_LONG ***")
        context = self.directory / "context"
        context.mkdir()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["xargs", "-0", "cp", "-P", "--parents", "-t", context], cwd=ROOT,
                       input=files.stdout, check=True)
        # Root's home is the same place inside.
        cache = pathlib.Path.home() / ".cache/ccache"
        mounted = ["--volume", f"{cache}:{cache}"] if cache.is_dir() else []
        self.build("build-cpu", "--build-arg", "JOBS=2", *mounted, context=context, timeout=3000)
        self.serves()

    def build(self, programs, *words, context=ROOT, timeout=500):
        """The image muond of the Dockerfile, with the programs of that stage or image."""
        self.image("base", BASE)
        # buildah 1.28 takes a stage's name from an argument only where it is given.
        self.buildah("bud", "--isolation", "chroot", "--layers=false", "--pull-never",
                     "--build-arg", "BASE=localhost/base", "--build-arg", f"PROGRAMS={programs}",
                     "--build-arg", "CUDA_IMAGE=localhost/base", *words,
                     "--ignorefile", DOCKER / "Dockerfile.dockerignore",
                     "--file", DOCKER / "Dockerfile", "--tag", "muond", context, timeout=timeout)

    def serves(self):
        """The image is as told, and a daemon in it serves and leaves."""
        config = json.loads(self.buildah("inspect", "--type", "image", "muond"))["OCIv1"]["config"]
        self.assertEqual(config["User"], "10001:10001")
        self.assertEqual(config["StopSignal"], "SIGTERM")
        self.assertEqual(config["Entrypoint"], ["/usr/lib/muond/entrypoint"])
        container = self.buildah("from", "--pull-never", "muond")

        def inside(*words):
            return self.buildah("run", "--isolation", "chroot", container, "--", *words)

        self.assertRegex(inside("muond", "--version"), r"^muond \d")
        self.assertEqual(inside("id", "-u"), "10001")
        # The daemon in its container, asked from the same one; the socket is its group's.
        said = inside("sh", "-c", """
            /usr/lib/muond/entrypoint --listen unix:///run/muond/muond.sock --backend cpu &
            for i in $(seq 100); do
              muonctl --endpoint unix:///run/muond/muond.sock health && break
              sleep 0.1
            done 2>/dev/null
            stat -c %a /run/muond/muond.sock
            kill $!
            wait $! && echo left cleanly""")
        self.assertIn("770", said)
        self.assertIn("left cleanly", said)


if __name__ == "__main__":
    if os.environ.get("MUOND_SANITIZE"):
        print("SKIPPED: no memory of ours is used here; the preset dev runs this", file=sys.stderr)
        sys.exit(77)
    if why_no_build():
        print(f"SKIPPED: the image's last stage: {why_no_build()}", file=sys.stderr)
    unittest.main()
