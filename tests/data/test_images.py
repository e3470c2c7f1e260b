# SPDX-License-Identifier: Apache-2.0
"""Images: the published table of sizes, laws of the layout, patches, and images that cannot be used."""

import io
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.golden_models import small_config

from dsv4_jax.data import images
from dsv4_jax.data.images import ImageError, Layout, inspect, layout_of, read, token_types
from dsv4_jax.data.vision_layout import VisionLayout

OFFICIAL = dict(
    vision_n_layers=1,
    vision_dim=8,
    vision_n_heads=2,
    vision_patch_size=14,
    vision_downsample_ratio=3,
    vision_max_n_token=1024,
    vision_min_pixels=295936,
    image_token_id=63,
)


def vision(**changes):
    return VisionLayout.of(small_config(**(OFFICIAL | changes)))


CFG = vision()
# original, pixels, patches, grid (all width x height), positions
TABLE = [
    ([(224, 224), (544, 544), (1, 1)], (546, 546), (39, 39), (13, 13), 184),
    ([(640, 480)], (644, 490), (46, 35), (16, 12), 206),
    ([(800, 600)], (812, 602), (58, 43), (20, 15), 317),
    ([(1000, 1000)], (1008, 1008), (72, 72), (24, 24), 602),
    ([(1302, 1302), (1303, 1303), (1344, 1344)], (1302, 1302), (93, 93), (31, 31), 994),
    ([(1920, 1080)], (1708, 966), (122, 69), (41, 23), 968),
    ([(1080, 1920)], (966, 1708), (69, 122), (23, 41), 986),
    ([(4000, 3000)], (1512, 1134), (108, 81), (36, 27), 1001),
    ([(100, 50)], (770, 392), (55, 28), (19, 10), 202),
    ([(10000, 500)], (5880, 294), (420, 21), (140, 7), 989),
    ([(500, 10000)], (252, 5040), (18, 360), (6, 120), 842),
    ([(20000, 10)], (24332, 14), (1738, 1), (580, 1), 583),
    ([(10, 20000)], (42, 21462), (3, 1533), (1, 511), 1024),
]


@pytest.mark.parametrize(("originals", "pixels", "patches", "grid", "positions"), TABLE)
def test_sizes_are_the_published_ones(originals, pixels, patches, grid, positions):
    for size in originals:
        layout = layout_of(*size, CFG)
        assert layout == Layout(pixels, patches[::-1], grid[::-1])
        assert layout.positions == positions == len(token_types(layout.grid))


def test_an_enlarged_size_is_cut_to_whole_pixels():
    """20 x 22 becomes 518.7 x 570.6: 518 is 37 patches, 519 would be 38."""
    assert layout_of(20, 22, CFG).size == (37 * 14, 41 * 14)


def obeys(layout, cfg):
    p, ratio = cfg.patch_size, cfg.downsample_ratio
    assert layout.positions <= cfg.max_n_token
    assert layout.patches == (layout.size[1] / p, layout.size[0] / p)
    assert layout.grid == tuple(math.ceil(n / ratio) for n in layout.patches)
    assert min(layout.grid) >= 1


side = st.one_of(st.integers(1, 30000), st.sampled_from([1, 2, 13, 14, 15, 41, 42, 43, 30000]))


@settings(max_examples=300)
@given(side, side)
def test_every_size_has_a_layout(width, height):
    layout = layout_of(width, height, CFG)
    obeys(layout, CFG)
    if width >= 42 and height >= 42:  # the shape is kept to a patch or two
        got, want = layout.size[0] / layout.size[1], width / height
        assert abs(math.log(got / want)) < 14 * (1 / layout.size[0] + 1 / layout.size[1]) * 1.7 or min(layout.grid) == 1


@settings(max_examples=300)
@given(side, side, st.integers(1, 9), st.integers(1, 4), st.integers(4, 99), st.integers(1, 9999), st.booleans())
def test_any_vision_tower_gives_layouts_that_fit(width, height, p, ratio, most, least, squeezed):
    changes = dict(vision_patch_size=p, vision_downsample_ratio=ratio, vision_max_n_token=most, vision_min_pixels=least)
    cfg = vision(**changes, vision_max_wh_ratio=2.5 if squeezed else None)
    obeys(layout_of(width, height, cfg), cfg)


def test_an_image_that_is_too_wide_is_squeezed():
    assert layout_of(4000, 1000, vision(vision_max_wh_ratio=2.0)) == layout_of(2000, 1000, CFG)
    assert layout_of(1000, 4000, vision(vision_max_wh_ratio=2.0)) == layout_of(1000, 4000, CFG)


def test_types_of_positions():
    assert token_types((2, 3)).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert token_types((1, 1)).tolist() == [0, 1, 2, 3]


TINY_CHANGES = dict(vision_patch_size=2, vision_downsample_ratio=2, vision_max_n_token=64, vision_min_pixels=1)
TINY = vision(**TINY_CHANGES)


def test_patches_are_the_pixels_in_reading_order(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    picture = Image.fromarray(rgb)
    picture.save(tmp_path / "a.png")
    got = read(picture, TINY)
    assert got.shape == (12, 3, 2, 2) and got.dtype == np.float32
    for row in range(3):
        for column in range(4):
            want = rgb[2 * row : 2 * row + 2, 2 * column : 2 * column + 2].transpose(2, 0, 1)
            np.testing.assert_allclose(got[4 * row + column], want / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(read((tmp_path / "a.png").read_bytes(), TINY), got)
    np.testing.assert_array_equal(read(tmp_path / "a.png", TINY), got)
    assert read(Image.new("L", (2, 2), 255), TINY).max() == 1 and read(Image.new("1", (2, 2)), TINY).min() == -1


def test_borders_are_grey_and_even():
    got = read(Image.new("RGB", (8, 5), (255, 0, 0)), vision(**TINY_CHANGES | {"vision_patch_size": 8}))
    red, grey = np.array([1, -1, -1], np.float32), np.full(3, 127 / 127.5 - 1, np.float32)
    column = got[0, :, :, 3].T
    assert [np.allclose(x, red) for x in column] == [False] * 2 + [True] * 5 + [False]
    np.testing.assert_allclose(column[[0, 1, 7]], np.tile(grey, (3, 1)), atol=1e-6)


def test_alpha_is_dropped_and_orientation_ignored():
    half = Image.new("RGBA", (4, 2), (10, 20, 30, 0))
    np.testing.assert_array_equal(read(half, TINY), read(Image.new("RGB", (4, 2), (10, 20, 30)), TINY))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "PNG", exif=exif)
    assert inspect(file.getvalue(), TINY).size == (4, 2)


def png(width, height, color=0):
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def claimed(width, height):
    """A PNG that says it has so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def jpeg():
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, "JPEG")
    return file.getvalue()


BAD = {
    "nothing": (b"", "no image of a known format"),
    "text": (b"no image", "no image of a known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a known format"),
    "truncated": (jpeg()[:2000], "truncated"),
    "damaged": (png(64, 64).replace(b"IHDR", b"IHDX"), "no image of a known format"),
    "bomb": (claimed(10000, 9000), "more than 89,478,485 pixels|DecompressionBomb"),
    "huge bomb": (claimed(60000, 60000), "DecompressionBombError"),
    "thin": (png(30000, 1), "too thin"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_image_that_cannot_be_used_says_why(name):
    content, words = BAD[name]
    cfg = vision(vision_max_n_token=64) if name == "thin" else CFG
    with pytest.raises(ImageError, match=words):
        inspect(content, cfg)
    assert inspect(png(3000, 2), CFG).positions <= 1024


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_an_error_where_pillow_only_warns():
    with pytest.raises(ImageError, match=r"10000 x 9000 are more than 89,478,485 pixels"):
        images.opened(claimed(10000, 9000))


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(1, 400))
def test_what_is_inspected_can_be_read(width, height):
    try:
        layout = inspect(png(width, height), TINY)
    except ImageError:
        assert max(width, height) > 30 * min(width, height)
        return
    assert len(read(png(width, height), TINY)) == layout.patches[0] * layout.patches[1]
