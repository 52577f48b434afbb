"""A plug-in of vLLM: engines on a CPU schedule asynchronously, as those on GPUs do by default.

vLLM switches async scheduling off for the platform, whatever it is asked for.
"""


def install():
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    if check.__module__ == __name__:
        return  # a process may load plug-ins twice

    def check_and_update(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update)
