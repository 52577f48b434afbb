"""Stands for SGLang's CUDA kernels: every name imports, none can be called.

The attention backend for CPUs is torch's own. SGLang 0.5.23 imports names of this package at its
start, and calls none of them for the models of these tests.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.10"


class Missing:
    """A name of the real package; its attributes are such names as well."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} needs SGLang's CUDA kernels")


class Submodule(ModuleType):
    """A module of the real package."""

    def __getattr__(self, name):
        return getattr(Missing(self.__name__), name)


class Submodules(MetaPathFinder, Loader):
    """Finds every module below this package."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{__name__}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Submodule(spec.name)

    def exec_module(self, module):
        pass


def __getattr__(name):
    return getattr(Missing(__name__), name)


sys.meta_path.append(Submodules())
