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
SMALL_PIECES = (4 * KIB, 8 * KIB, 16 * KIB, 24 * KIB, 32 * KIB)
"""Around the size from which on pages are copied without staging memory."""
COUNTS, PROGRAMS = (16, 256, 4096), (4, 8, 16, 64)
"""Copies of a call, and programs of a kernel that reads or writes host memory."""
PLAN_TENSORS = 64
STAGES = ((2, 24 * MIB), (4, 24 * MIB), (3, 32 * MIB), (2, 96 * MIB))
"""Of a direction, and the bytes of each."""
CHUNKS = 60
"""Transfers of one chunk; the first of them are not counted."""
BEHIND = ("61 x 18 KiB", "64 x 64 KiB")
"""Caches whose stores wait for a busy engine."""
SUBMIT_PAGE, SUBMIT_BLOCKS, SUBMITS = 32 * KIB, (1, 64, 8000), 30
CONNECTOR_CASES = 3
"""Sizes of chunks that a connector loads."""
PINNED_BYTES = 4 * GIB
CAPTURES = 30
SMOKE_SLOTS, REGISTRATION_BYTES = 2048, 64 * MIB
"""Slots enough for several registrations of host memory."""
SMOKE = {
    "pages of four sizes": ((4096, 18432, 24, 65536), 256),
    "a tensor above 2 GiB": ((65536, 24), 36_000),
}
"""Bytes of a block's pages, and blocks."""
