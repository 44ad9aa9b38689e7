# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that a host imports and that cannot be installed here (vllm and kernel libraries).

`install(roots)` makes every module below these roots importable. Their attributes are empty classes, except where
`give` sets something that works."""
import abc
import importlib.abc
import importlib.machinery
import sys
import types


class _Empty(abc.ABCMeta):
    """An empty class has empty classes as attributes, and can be subscribed, called and derived from."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _empty(name)
        setattr(cls, name, value)
        return value


def _empty(name):
    # what a call returns can decorate: it gives back what it gets
    return _Empty(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, x=None, *a, **k: x,
                             "__class_getitem__": classmethod(lambda c, x: c),
                             "__init_subclass__": classmethod(lambda c, **k: None)})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        value = [] if name == "__all__" else _empty(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(root + ".") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install(*roots):
    sys.meta_path.append(_Finder(set(roots)))       # after the real ones: what is installed is used


def replace(*roots):
    """Stands in for parts of a host that are there, and need what is not."""
    sys.meta_path.insert(0, _Finder(set(roots)))


def give(name, **values):
    """Sets attributes of a stand-in module."""
    module = importlib.import_module(name)
    for key, value in values.items():
        setattr(module, key, value)


def fails(what, call):
    """Asserts that call raises an error that says `what`."""
    try:
        call()
    except Exception as error:
        assert what in str(error), error
    else:
        raise AssertionError(f"no error with {what!r}")
