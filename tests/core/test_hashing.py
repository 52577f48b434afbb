import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core.hashing import BlockHasher, HashChain, MultiModalItem
from kvoffload.errors import ConfigError
from tests.support.vllm_hashing import VllmBlockHasher

SECRET = b"sixteen bytes or more"
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.fixture(params=["sha256", "blake3", "xxh3", "vllm"])
def hasher(request):
    if request.param == "vllm":
        return VllmBlockHasher(4, lora_paths={"a": "/a", "b": "/b"})
    return BlockHasher(4, request.param, root=SECRET)


def test_the_bytes_hashed_are_the_ones_documented():
    root = hashlib.sha256(
        b"kvoffload.block-hash.v1"
        b"A\x06\0\0\0sha256" b"B\x04\0\0\0" + struct.pack("<I", 4) + b"R\0\0\0\0"
    ).digest()  # fmt: skip
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert HashChain(BlockHasher(4), [1, 2, 3, 4, 5, 6, 7, 8, 9]).hashes == [first, second]


def test_hashes_are_the_same_in_another_process():
    code = (
        "from kvoffload.core.hashing import *;"
        "print(HashChain(BlockHasher(4), range(8), lora='a').hashes[-1].hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7"},
    ).stdout.strip()  # fmt: skip
    assert other == HashChain(BlockHasher(4), range(8), lora="a").hashes[-1].hex()


@given(prompt=TOKENS, parts=st.lists(TOKENS, max_size=4))
def test_hashes_do_not_depend_on_how_tokens_were_appended(prompt, parts):
    hasher = BlockHasher(4)
    chain = HashChain(hasher, prompt)
    for part in parts:
        if len(part) % 2:
            chain.extend(part)
        else:
            for token in part:
                chain.append(token)
    whole = HashChain(hasher, [*prompt, *(token for part in parts for token in part)])
    assert chain.hashes == whole.hashes
    assert chain.token_ids == whole.token_ids
    assert len(chain.hashes) == len(chain) // 4


def test_a_hash_covers_the_whole_prefix(hasher):
    one = HashChain(hasher, range(12)).hashes
    for position in range(12):
        tokens = list(range(12))
        tokens[position] += 100
        other = HashChain(hasher, tokens).hashes
        assert [a == b for a, b in zip(one, other, strict=True)] == [
            i < position // 4 for i in range(3)
        ]


def test_lora_salt_and_images_keep_prompts_apart(hasher):
    image = MultiModalItem("cat", 5, 2)
    variants = [
        {},
        {"lora": "a"},
        {"lora": "b"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora": "a", "cache_salt": "b"},
        {"mm_items": [MultiModalItem("a", 0, 1)]},
        {"mm_items": [MultiModalItem("cat", 1, 2)]},
        {"mm_items": [MultiModalItem("cat", 2, 2)]},
        {"mm_items": [MultiModalItem("dog", 1, 2)]},
    ]
    firsts = [HashChain(hasher, range(8), **options).hashes[0] for options in variants]
    assert len(set(firsts)) == len(variants)
    # An image in the second block leaves the first one alone, wherever it is listed.
    with_image = HashChain(hasher, range(8), mm_items=[image])
    assert with_image.hashes[0] == firsts[0]
    assert with_image.hashes[1] != HashChain(hasher, range(8)).hashes[1]


def test_items_given_out_of_order_are_sorted(hasher):
    items = [MultiModalItem("b", 3, 1), MultiModalItem("a", 1, 1)]
    assert (
        HashChain(hasher, range(4), mm_items=items).hashes
        == HashChain(hasher, range(4), mm_items=items[::-1]).hashes
    )


def test_tenants_with_different_secrets_share_nothing():
    hashes = {
        HashChain(BlockHasher(4, algorithm, root), range(4)).hashes[0]
        for algorithm in ("sha256", "blake3", "xxh3")
        for root in (SECRET, SECRET + b"!", None)
        if root or algorithm != "xxh3"
    }
    assert len(hashes) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": 4, "algorithm": "md5"}, "must be one of sha256, blake3, xxh3"),
        ({"block_size": 4, "algorithm": "xxh3"}, "secret root"),
        ({"block_size": 4, "root": b"short"}, "at least 16 bytes"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BlockHasher(**arguments)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "x"])
def test_a_token_that_is_no_token_is_refused(token):
    with pytest.raises(ValueError, match="token ids"):
        HashChain(BlockHasher(1), [token])


@pytest.mark.parametrize("token", [2**64, -(2**64) - 1, 1.5, 300.5, "x", None])
def test_a_token_that_vllm_cannot_name_is_refused(token):
    with pytest.raises(ValueError, match="token ids must be whole numbers from"):
        HashChain(VllmBlockHasher(2), [1, token])


def test_vllm_hashes_cover_placeholders_below_zero():
    """CBOR: an array of parent, tokens and null; a negative number n is written as -1 - n."""
    hasher = VllmBlockHasher(3)
    data = b"\x83\x58\x20" + hasher.root + b"\x83\x01\x20\x39\x01\xf3" + b"\xf6"
    assert HashChain(hasher, [1, -1, -500]).hashes == [hashlib.sha256(data).digest()]


def test_an_adapter_without_a_path_has_no_vllm_hash():
    with pytest.raises(ConfigError, match="adapter 'a'"):
        HashChain(VllmBlockHasher(1), [1], lora="a")


def test_vllm_hashes_are_those_vllm_made():
    """Recorded from vLLM 0.32 with ``sha256_cbor``; tests/engines compares with a live one."""
    assert VllmBlockHasher(4).root.hex() == (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    )
