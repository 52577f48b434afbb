"""A streaming session, whose prompt comes in segments: for an engine in this process."""

import time

from vllm import SamplingParams

STEPS = 4000


def run_session(engine, segments, max_tokens, name):
    """Run a session to its end; return all its tokens, those between segments among them.

    Args:
        engine: vLLM's ``LLMEngine``, which has no process of its own for its core.
        segments: token ids; the next one comes when the last one's tokens are made.
        max_tokens: made after each segment.
        name: of the request.
    """
    core = engine.engine_core.engine_core
    internal = None

    def step_until(is_over):
        for _ in range(STEPS):
            if is_over():
                return
            if core.scheduler.has_requests():
                core.step_fn()
            time.sleep(0.001)
        raise AssertionError(f"the session {name} goes on for ever")

    def waits():
        return core.scheduler.requests[internal].status.name == "WAITING_FOR_STREAMING_REQ"

    for segment in segments:
        internal = send(engine, name, internal, segment, max_tokens)
        step_until(waits)
    tokens = list(core.scheduler.requests[internal]._all_token_ids)
    send(engine, name, internal, [0], max_tokens, resumable=False)  # ends it
    step_until(lambda: internal not in core.scheduler.requests)
    return tokens


def send(engine, name, internal, tokens, max_tokens, *, resumable=True):
    """Send a segment of a session; return vLLM's own name of it, which is None before the first."""
    request = engine.input_processor.process_inputs(
        request_id=internal or name,
        prompt={"prompt_token_ids": tokens},
        params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        supported_tasks=("generate",),
        resumable=resumable,
    )
    if internal is None:
        request.external_req_id = name
    engine.engine_core.add_request(request)
    return request.request_id
