"""The slide encoder: Prov-GigaPath's parameters and numbers without its dependencies. With
LONGSPAN_GIGAPATH=path/to/prov-gigapath it is compared with the original, too."""

import functools
import os
import sys

import numpy as np
import pytest

import longspan

torch = pytest.importorskip("torch")

import oracle
from longspan.bench.composition import dilated_composition, longnet_composition
from longspan.torch.slide_encoder import SlideEncoder, load_slide_weights, longspan_attention

SEGMENTS, DILATIONS = [8, 16, 64], [1, 2, 4]


def small(attend=None, **options):
    torch.manual_seed(0)
    attend = attend or longspan_attention(SEGMENTS, DILATIONS)
    return SlideEncoder(tile_features=20, width=32, layers=2, heads=4, grid=50, attend=attend, **options).eval()


def slide(tiles=43, batch=2, features=20):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(batch, tiles, features, generator=generator),
        torch.randint(50 * 256, (batch, tiles, 2), generator=generator).float(),
    )


def test_encoder_equals_itself_over_the_formula():
    def attend(q, k, v, lengths):
        return oracle.torchscale_attention(q, k, v, SEGMENTS, DILATIONS).to(q.dtype)

    tiles, places = slide()
    torch.testing.assert_close(small()(tiles, places), small(attend)(tiles, places), atol=2e-5, rtol=0)


def test_encoder_equals_itself_over_torch():
    tiles, places = slide()
    peer = small(longnet_composition(SEGMENTS, DILATIONS))
    torch.testing.assert_close(small()(tiles, places), peer(tiles, places), atol=2e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_benchmark_compares_equal_things(causal):
    query, key, value = (torch.randn(2, 64, 5, 8) for _ in range(3))
    module = longspan.torch.DilatedAttention([16, 32], [1, 2])
    peer = dilated_composition([16, 32], [1, 2])
    torch.testing.assert_close(
        module(query, key, value, is_causal=causal), peer(query, key, value, is_causal=causal), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("global_pool", [False, True])
def test_padded_slides_equal_slides_alone(global_pool):
    model = small(global_pool=global_pool)
    tiles, places = slide()
    together = model(tiles, places, torch.tensor([43, 17]))
    torch.testing.assert_close(together[:1], model(tiles[:1], places[:1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(together[1:], model(tiles[1:, :17], places[1:, :17]), atol=1e-5, rtol=0)


def test_every_layer_on_request():
    tiles, places = slide()
    assert [tuple(x.shape) for x in small()(tiles, places, all_layers=True)] == [(2, 32)] * 3


def test_weights_load_under_their_published_names(tmp_path):
    model = small()
    assert {"patch_embed.proj.weight", "cls_token", "encoder.layers.1.self_attn.inner_attn_ln.weight",
            "encoder.layers.0.ffn.ffn_layernorm.bias", "encoder.layer_norm.weight", "norm.weight"} <= set(
        model.state_dict()
    )  # fmt: skip
    file = tmp_path / "slide_encoder.pth"
    torch.save({"model": {**model.state_dict(), "pos_embed": torch.zeros(1)}}, file)
    other = small()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    load_slide_weights(other, file)
    tiles, places = slide()
    torch.testing.assert_close(other(tiles, places), model(tiles, places))
    torch.save({"model": {"cls_token": model.cls_token.detach()}}, file)
    with pytest.raises(longspan.InvalidArgument, match="lacks"):
        load_slide_weights(other, file)
    with pytest.raises(longspan.InvalidArgument, match="is a folder: give .* file") as error:
        load_slide_weights(other, tmp_path)
    assert error.value.argument == "file"


GIGAPATH = os.environ.get("LONGSPAN_GIGAPATH")


@pytest.mark.skipif(not GIGAPATH, reason="set LONGSPAN_GIGAPATH to a checkout of prov-gigapath")
def test_equal_to_the_original_with_its_weights():
    import longspan.torchscale

    longspan.torchscale.install()
    path = list(sys.path)  # gigapath adds to it
    sys.path.insert(0, GIGAPATH)
    try:
        from gigapath.slide_encoder import LongNetViT

        np.set_printoptions(legacy="1.25")  # it prints NumPy integers into a text and evaluates that
        torch.manual_seed(0)
        original = LongNetViT(
            in_chans=20, embed_dim=384, depth=3, slide_ngrids=50, mlp_ratio=4,
            norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6),
        ).eval()  # fmt: skip
        mine = SlideEncoder(tile_features=20, width=384, layers=3, grid=50).eval()
        mine.load_state_dict({name: original.state_dict()[name] for name in mine.state_dict()})
        tiles, places = slide(tiles=1300, batch=1)
        torch.testing.assert_close(mine(tiles, places), original(tiles, places)[-1], atol=1e-5, rtol=0)
        for one, two in zip(mine(tiles, places, all_layers=True), original(tiles, places, all_layer_embed=True)):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    finally:
        longspan.torchscale.uninstall()
        np.set_printoptions(legacy=False)
        sys.path[:] = path
