"""A plug-in of vLLM: another instruction set of this processor, as another processor has alone.

``vec16`` writes the keys and values of a block in another order than ``amx`` and ``vec``.
"""


def install() -> None:
    from vllm.v1.attention.backends import cpu_attn

    cpu_attn._get_attn_isa = lambda *args, **kwargs: "vec16"
