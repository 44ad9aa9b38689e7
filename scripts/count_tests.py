#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts what a JUnit file of ctest or pytest says, for scripts/test.sh.

    count_tests.py FILE ALLOWED

The first line is "PASSED FAILED SKIPPED"; a line per skip follows. Skips inside a program count, too: cmocka's, and
those that a Python check reports as a line "SKIP name: reason". A skip that no pattern of ALLOWED matches is a failure.
ALLOWED has lines "pattern | reason"; the pattern, as in a shell, must match "test: reason of the skip". A file that is
missing, broken or empty counts as one failure."""
import fnmatch
import re
import sys
import xml.etree.ElementTree as tree

CMOCKA = re.compile(r"^\[\s*SKIPPED\s*\] (\w+)$", re.M)
CHECK = re.compile(r"^SKIP (.+)$", re.M)
UNITTEST = re.compile(r"^(?:OK|FAILED) \(.*?skipped=(\d+)", re.M)


def inner_skips(name, output):
    """Skips that the output of one program reports."""
    found = [f"{name}: {case}" for case in dict.fromkeys(CMOCKA.findall(output))]
    checks = CHECK.findall(output)
    found += [f"{name}: {line}" for line in checks]
    silent = sum(int(n) for n in UNITTEST.findall(output)) - len(checks)
    if silent > 0:
        found.append(f"{name}: {silent} skipped without a line SKIP name: reason")
    return found


def outer_skip(name, case, output):
    """The skip of a whole test: pytest gives the reason, ctest only the output, which ends with it."""
    reason = (case.find("skipped").get("message") or "").strip()
    lines = [line for line in output.strip().splitlines() if line.strip()]
    if reason.startswith("SKIP_RETURN_CODE") or not reason:
        reason = lines[-1] if lines else "no reason given"
    return f"{name}: {reason}"


def count(path):
    """Passed, failed, skips."""
    passed, failed, skips = 0, 0, []
    for case in tree.parse(path).iter("testcase"):
        file = case.get("classname", "")
        name = case.get("name", "") if file == case.get("name") else f"{file}.{case.get('name', '')}".strip(".")
        output = case.findtext("system-out") or ""
        if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
            failed += 1
        elif case.find("skipped") is not None:
            skips.append(outer_skip(name, case, output))
        else:
            passed += 1
        skips += inner_skips(name, output)
    return passed, failed, skips


def read_allowed(path):
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    return [tuple(part.strip() for part in line.split(" | ", 1)) for line in lines]


def main():
    path, allowed = sys.argv[1], read_allowed(sys.argv[2])
    try:
        passed, failed, skips = count(path)
    except (OSError, tree.ParseError):
        passed, failed, skips = 0, 0, []
    if passed + failed + len(skips) == 0:
        print("0 1 0\nno tests ran")
        return
    lines = []
    for skip in skips:
        reason = next((why for pattern, why in allowed if fnmatch.fnmatchcase(skip, pattern)), None)
        lines.append(f"skipped, allowed ({reason}): {skip}" if reason else f"skipped, NOT allowed: {skip}")
        failed += reason is None
    print(passed, failed, len(skips))
    print("\n".join(lines), end="\n" if lines else "")


if __name__ == "__main__":
    main()
