"""What an engine does with a request over a local connector; its blocks have four tokens."""


def compute(connector, request, blocks):
    """Compute a prompt in these blocks, store its chunks, and end it; return the blocks."""
    connector.after_forward(request, [blocks], request.num_tokens // 4 * 4)
    assert connector.flush()
    connector.request_finished(request)
    return blocks


def begin_load(connector, request, blocks):
    """Begin to load what is promised of a request; return how many tokens that is."""
    tokens = connector.get_num_new_matched_tokens(request, 0)
    if tokens:
        connector.update_state_after_alloc(request, [blocks], tokens)
    return tokens
