# SPDX-License-Identifier: Apache-2.0
"""`python -m esa`: the esa command, where it is not on the PATH."""
from .programs.native import main

if __name__ == "__main__":
    raise SystemExit(main())
