"""A failed test of whole processes gets a second try; others and sanitizers' finds do not."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

AGAIN = pathlib.Path(__file__).resolve().parents[1] / "again.py"

TESTS = """\
add_test([=[Passes]=] "true")
set_tests_properties([=[Passes]=] PROPERTIES LABELS "cluster")
add_test([=[Unit]=] "false")
set_tests_properties([=[Unit]=] PROPERTIES LABELS "unit")
add_test([=[Late/0  # GetParam() = 4-byte object <00-00 00-00>]=] "false")
set_tests_properties([=[Late/0  # GetParam() = 4-byte object <00-00 00-00>]=] PROPERTIES
  LABELS "cluster")
add_test([=[Race]=] "sh" "-c" "echo 'WARNING: ThreadSanitizer: data race'; false")
set_tests_properties([=[Race]=] PROPERTIES LABELS "cluster")
add_test([=[e2e.slow]=] "false")
set_tests_properties([=[e2e.slow]=] PROPERTIES LABELS "e2e")
"""


class Again(unittest.TestCase):

    def chosen(self, *options):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "CTestTestfile.cmake").write_text(TESTS)
            subprocess.run(["ctest", "--test-dir", folder, "--output-junit", "report.xml",
                            *options], capture_output=True, check=False)
            return subprocess.run(
                [sys.executable, "-B", AGAIN, folder, pathlib.Path(folder) / "report.xml"],
                capture_output=True, check=True, text=True).stdout.strip()

    def test_only_what_load_can_fail_is_tried_again(self):
        self.assertEqual(self.chosen(), "3,5")

    def test_numbers_are_those_of_all_tests(self):
        self.assertEqual(self.chosen("-L", "^(cluster|e2e)$"), "3,5")
        self.assertEqual(self.chosen("-E", "Passes"), "3,5")

    def test_nothing_failed(self):
        self.assertEqual(self.chosen("-R", "Passes"), "")


if __name__ == "__main__":
    unittest.main()
