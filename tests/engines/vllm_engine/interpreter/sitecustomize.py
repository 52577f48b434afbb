"""Lets vLLM use Triton without a GPU; Python imports this module at its start if it finds it.

Model Runner V2 needs Triton. Triton's interpreter, which ``TRITON_INTERPRET=1`` chooses, runs
kernels on the CPU. Three things keep vLLM from it:

* vLLM drops Triton unless one of Triton's backends has an active driver.
* Torch's compiler, which layers of tensor parallel ranks use, asks Triton for a target that the
  interpreter does not have. What would be compiled runs as it is written.
* The interpreter takes masks of truth values alone, and a kernel for n-grams has other ones.
"""

import os


def prepare():
    """Do what the module says."""
    from triton import backends
    from triton.runtime.interpreter import InterpreterBuilder

    class Interpreter:
        """A driver that is active, and does nothing."""

        @staticmethod
        def is_active():
            return True

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self, pointers, mask, *rest):
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *rest)

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Interpreter)
    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store


if os.environ.get("TRITON_INTERPRET") == "1":
    prepare()
