#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a JUnit file counts, as test.sh books it: count_junit.py FILE SECONDS prints "PASSED FAILED SECONDS REMARK". A
file that is missing, broken or empty is one failure."""
import sys
import xml.etree.ElementTree as tree


def main():
    path, seconds = sys.argv[1:3]
    try:
        suites = list(tree.parse(path).iter("testsuite"))
        total, failures, errors, skipped = (sum(int(s.get(key, "0")) for s in suites)
                                            for key in ("tests", "failures", "errors", "skipped"))
    except (OSError, tree.ParseError, ValueError):
        total = 0
    if total == 0:
        print(0, 1, seconds, "pytest_ran_no_tests")
        return
    bad = failures + errors
    print(total - bad - skipped, bad, seconds, f"{skipped}_skipped" if skipped else "")


if __name__ == "__main__":
    main()
