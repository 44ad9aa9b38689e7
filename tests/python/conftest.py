# SPDX-License-Identifier: Apache-2.0
"""Shared by the Python tests: one thread per process (the machine runs other stages beside), seeds that are printed,
slow tests on demand."""
import importlib.metadata
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "compat" / "mindiesd")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")        # no network: whatever a test needs is made here
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


# Models that the diffusers of requirements-036.txt does not have yet.
OLD = importlib.metadata.version("diffusers").startswith("0.3")
collect_ignore = ["test_minimax_h3.py", "test_ltx2.py"] if OLD else []


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes (make test-all)")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; runs with --slow")
    try:
        import torch
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    except ImportError:
        pass


def pytest_collection_modifyitems(config, items):
    """Slow tests are not collected unless asked for: a skipped test would look like one that ran."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    items[:] = [item for item in items if "slow" not in item.keywords]
    if slow:
        config.hook.pytest_deselected(items=slow)


@pytest.fixture
def seed(request):
    """$ESA_TEST_SEED, or a fixed number; printed, so that a failure can be repeated."""
    value = int(os.environ.get("ESA_TEST_SEED", "1"))
    print(f"ESA_TEST_SEED={value}")
    return value
