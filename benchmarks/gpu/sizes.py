"""How much the parts of the first run move, and how often; tests put small numbers here."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

WAIT_S = 30.0
"""For pinning, before it counts as failed."""
ROUNDS = 9
"""Of each measurement; its median is the row."""
LINK_BYTES = (64 * MIB, 256 * MIB)
"""Of one large copy, and of one of our transfers."""
PIECES = tuple(kib * KIB for kib in (1, 4, 8, 16, 24, 28, 32, 64, 128, 256, 1024, 2048))
MOST_PIECES = 16384
SHAPES = {
    "64 x 4 KiB": (64, 4 * KIB),
    "61 x 18 KiB": (61, 18 * KIB),
    "64 x 32 KiB": (64, 32 * KIB),
    "64 x 64 KiB": (64, 64 * KIB),
    "1 x 2 MiB": (1, 2 * MIB),
}
"""KV caches: the number of tensors, and bytes of their pages."""
WITH_STEPS = ("61 x 18 KiB", "64 x 64 KiB", "1 x 2 MiB")
"""Those whose transfers run during a model's steps."""
STEPS = {"prefill-like step": 100, "decode-like step": 200, "small copy": 400}
"""Steps of a round, alone and during transfers; there are two rounds."""
PRODUCT, PRODUCTS, WEIGHTS = 8192, 8, 48
"""Rows of square matrices; products of a prefill-like step, and matrices of a decode-like one."""
LISTEN_S = 0.5
"""How long a second thread's delays are watched, and transfers without a model."""
SUBMIT_PAGE, SUBMIT_BLOCKS, SUBMITS = 32 * KIB, (1, 64, 8000), 30
PINNED_BYTES = 4 * GIB
CAPTURES = 30
SMOKE_SLOTS, REGISTRATION_BYTES = 2048, 256 * MIB
"""Slots enough for two registrations of host memory."""
SMOKE = {
    "pages of four sizes": ((4096, 18432, 24, 65536), 256),
    "a tensor above 2 GiB": ((65536, 24), 36_000),
}
"""Bytes of a block's pages, and blocks."""
