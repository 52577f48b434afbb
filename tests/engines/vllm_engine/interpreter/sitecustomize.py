"""Lets vLLM use Triton without a GPU; Python imports this module at its start if it finds it.

vLLM drops Triton unless one of Triton's backends has an active driver. Triton's interpreter, which
``TRITON_INTERPRET=1`` chooses, runs kernels on the CPU without a driver. Model Runner V2 needs
Triton.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton import backends

    class Interpreter:
        """A driver that is active, and does nothing."""

        @staticmethod
        def is_active():
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=Interpreter)
