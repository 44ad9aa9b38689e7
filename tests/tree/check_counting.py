#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/count_tests.py counts passes, failures and skips, and takes a skip that is not allowed for a failure:
check_counting.py SOURCE."""
import os
import subprocess
import sys
import tempfile
import unittest

SOURCE = os.path.abspath(sys.argv[1])
ALLOWED = "# a remark\na.one: small* | the machine is small\ntests.test_x.*: no network | needs the network\n"


def case(name, body="", output="", status="run"):
    return (f'<testcase name="{name}" classname="{name}" time="1" status="{status}">{body}'
            f"<system-out>{output}</system-out></testcase>")


class Counting(unittest.TestCase):
    def count(self, text):
        with tempfile.TemporaryDirectory() as folder:
            for name, content in (("x.xml", text), ("allowed", ALLOWED)):
                with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                    file.write(content)
            done = subprocess.run([sys.executable, os.path.join(SOURCE, "scripts/count_tests.py"),
                                   os.path.join(folder, "x.xml"), os.path.join(folder, "allowed")],
                                  capture_output=True, text=True, check=True)
        first, *lines = done.stdout.splitlines()
        return first, lines

    def suite(self, *cases):
        return self.count(f'<testsuite>{"".join(cases)}</testsuite>')

    def test_passed_and_failed(self):
        first, lines = self.suite(case("a"), case("b"), case("c", "<failure/>", status="fail"), case("d", "<error/>"))
        self.assertEqual((first, lines), ("2 2 0", []))

    def test_nothing_ran(self):
        for text in ("", "<broken", "<testsuite/>"):
            self.assertEqual(self.count(text)[0], "0 1 0", text)

    def test_program_that_skips_as_a_whole(self):
        skipped = '<skipped message="SKIP_RETURN_CODE=77"/>'
        first, lines = self.suite(case("a.one", skipped, "small machine\n", "notrun"), case("b"))
        self.assertEqual(first, "1 0 1")
        self.assertEqual(lines, ["skipped, allowed (the machine is small): a.one: small machine"])
        self.assertEqual(self.suite(case("a.two", skipped, "small machine", "notrun"), case("b"))[0], "1 1 1")

    def test_cmocka(self):
        output = "[  SKIPPED ] small_case\n[       OK ] other\n[  SKIPPED ] 1 test(s), listed below:\n" \
                 "[  SKIPPED ] small_case\n"
        self.assertEqual(self.suite(case("a.one", output=output))[0], "1 0 1")
        first, lines = self.suite(case("a.two", output=output))
        self.assertEqual((first, lines), ("1 1 1", ["skipped, NOT allowed: a.two: small_case"]))

    def test_python_check(self):
        said = "SKIP small.test: why\n....\nOK (skipped=1)\n"
        self.assertEqual(self.suite(case("a.one", output=said))[0], "1 0 1")
        first, lines = self.suite(case("a.one", output="....\nOK (skipped=1)\n"))
        self.assertEqual((first, len(lines)), ("1 1 1", 1))
        self.assertIn("without a line SKIP", lines[0])

    def test_pytest(self):
        test = '<testcase classname="tests.test_x" name="test_y"><skipped message="{}">file.py:1</skipped></testcase>'
        self.assertEqual(self.suite(test.format("no network"), case("b"))[0], "1 0 1")
        self.assertEqual(self.suite(test.format("no reason"), case("b"))[0], "1 1 1")

    def test_every_allowed_skip_has_a_reason(self):
        with open(os.path.join(SOURCE, "tests/allowed_skips.txt"), encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
        self.assertLess(len(lines), 20)
        for line in lines:
            pattern, reason = line.split(" | ")
            self.assertIn(": ", pattern, line)
            self.assertGreater(len(reason), 10, line)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
