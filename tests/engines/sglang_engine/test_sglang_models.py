"""Other models and forms on a real engine: equal outputs, and hits in a new process."""

import pytest

from kvoffload.cli.top import fetch, of_page
from tests.support.disk_chunks import stored_in
from tests.support.redis_server import free_port

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]

WINDOW = 64
SIZES = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "max_position_embeddings": 4096, "initializer_range": 0.15,
}  # fmt: skip


def serve_again(start, extra, asked, **options):
    """Compare outputs computed, from storage, and in a new process; return that engine."""
    first = start("dynamic", extra, **options)
    computed = first.generate(asked)
    assert computed["storage"] == [0]
    first.wait_stored(asked, computed["tokens"])
    first.kill()
    second = start("dynamic", extra, **options)
    answer = second.generate(asked)
    assert answer["tokens"] == computed["tokens"]
    assert answer["storage"] == [592]
    return second, computed["tokens"]


@pytest.mark.parametrize("parallelism", ["tp_size", "pp_size"])
def test_two_ranks(start, prompt, tiers, disk, parallelism, tmp_path):
    port = free_port()
    extra = tiers(disk(tmp_path / "kv"), metrics_port=port)
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    serve_again(start, extra, prompt(1), **{parallelism: 2}, env=bind)
    for rank in range(2):
        reading = of_page(fetch(f"http://127.0.0.1:{port + rank}"))
        assert reading.tiers["disk"]["hit_tokens"] == 592


def test_pages_by_layer(start, prompt, tiers, disk, tmp_path):
    serve_again(start, tiers(disk(tmp_path / "kv")), prompt(1), hicache_mem_layout="layer_first")


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """The folder of a tiny model that keeps one latent vector a token in place of K and V."""
    import torch
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    torch.manual_seed(0)
    config = MiniCPM3Config(
        **SIZES, num_key_value_heads=8, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=32, scale_emb=1, dim_model_base=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("latent")
    MiniCPM3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def test_host_memory_that_keeps_no_page(start, prompt, tiers, disk, tmp_path):
    """SGLang remembers which pages are stored; it must learn that one is lost, and store it."""
    root, asked = tmp_path / "kv", prompt(1)
    mode = {"hicache_host_memory_mode": "buffer_only"}
    engine, told = serve_again(start, tiers(disk(root)), asked, **mode)
    for chunk in stored_in(root)[::5]:
        chunk.wipe()
    engine.forget()
    answer = engine.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] != [592]
    engine.wait_stored(asked, told)


def of_pool(root, number):
    """Return the pages of a pool in a root, by the last byte of their keys."""
    return [chunk for chunk in stored_in(root) if chunk.key[-4:] == number.to_bytes(4, "big")]


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_latent_pages_of_mla(start, prompt, tiers, disk, latent, layout, tmp_path):
    extra = tiers(disk(tmp_path / "kv"))
    serve_again(start, extra, prompt(1), model_path=latent, hicache_mem_layout=layout)
    sizes = {chunk.allocated_bytes for chunk in of_pool(tmp_path / "kv", 0)}
    latent_bytes = 4 * 16 * (64 + 32) * 2  # layers, tokens of a page, elements, bytes of each
    assert all(latent_bytes <= size < 2 * latent_bytes for size in sizes), sizes


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The folder of a tiny model whose every other layer sees a window only."""
    import torch
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    config = MellumConfig(
        **SIZES, num_key_value_heads=4, head_dim=32, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, mlp_layer_types=["dense"] * 4,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hybrid")
    MellumForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def test_sliding_windows_are_a_pool_of_their_own(start, prompt, tiers, disk, hybrid, tmp_path):
    root, asked = tmp_path / "kv", prompt(1)
    engine, told = serve_again(start, tiers(disk(root)), asked, model_path=hybrid)
    windows = of_pool(root, 1)
    assert len(windows) == WINDOW // 16  # the last pages only: no other can be asked for
    assert len(of_pool(root, 0)) == 592 // 16
    for lost in (windows[:1], windows[1:]):
        for chunk in lost:
            chunk.wipe()
        engine.forget()
        answer = engine.generate(asked)
        assert answer["tokens"] == told
        assert answer["storage"] == [0]  # a window with a gap restores nothing
        engine.wait_stored(asked, told)
