"""Lets vLLM look at the class of a model in the process that asks: importing it is enough.

vLLM starts a Python for it, which takes twelve seconds of a core. It does so for each class that
its cache folder does not know, as that of a new machine.
"""

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda look: look()
